"""Gradients that are summed in float32, whatever the parameters are; and parameters with float32 copies.

backward ──> parameter.grad (bf16) ──hook──> sum (float32)      once a micro-batch; the bf16 one is gone
end of the window:  sum ──> master.grad, or, cast once, parameter.grad
"""

from collections.abc import Iterable

import torch


class GradientSums:
    """Sums of the gradients of some parameters, in another dtype.

    Args:
        parameters: leaves of low precision; each micro-batch's gradient is taken from them.
        dtype: of the sums.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._sums: dict[torch.nn.Parameter, torch.Tensor] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]
            for parameter in parameters
        ]

    def _take(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None or not isinstance(parameter, torch.nn.Parameter):
            return
        parameter.grad = None
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = gradient.to(self._dtype)
        else:
            total.add_(gradient)

    def of(self, parameter: torch.nn.Parameter) -> torch.Tensor | None:
        """Return a parameter's sum, in its own dtype; None if it had no gradient."""
        return self._sums.get(parameter)

    def set(self, parameter: torch.nn.Parameter, total: torch.Tensor) -> None:
        """Go on from a sum."""
        self._sums[parameter] = total

    def put_back(self, factor: float) -> None:
        """Give every parameter its sum times a factor, rounded to its own dtype once."""
        for parameter, total in self._sums.items():
            parameter.grad = (total if factor == 1.0 else total * factor).to(parameter.dtype)
        self._sums = {}

    def clear(self) -> None:
        """Forget the sums."""
        self._sums = {}

    def remove(self) -> None:
        """Leave the parameters as they were."""
        for hook in self._hooks:
            hook.remove()
