"""Sums of gradients in float32, whatever the parameters' dtype.

backward ──> parameter.grad (bf16) ──hook──> sum (float32)      per micro-batch; then the bf16 one is freed
end of the window:  sum ──> master.grad, or, rounded once, parameter.grad
"""

from collections.abc import Iterable, Mapping
from functools import partial
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memfit.strategies.accumulation import Accumulation


class GradientSums:
    """Sums of the gradients of some parameters, in another dtype.

    Args:
        parameters: leaves of low precision; each micro-batch's gradient is taken from them.
        dtype: of the sums.
        masters: the tensors, if any, that the optimizer updates in place of parameters.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        dtype: torch.dtype,
        masters: Mapping[nn.Parameter, nn.Parameter],
    ) -> None:
        self._dtype, self._masters = dtype, masters
        self._sums: dict[nn.Parameter, torch.Tensor] = {}
        self.active = False
        """Whether gradients are taken: while a window is open. Gradients of other backwards are not."""
        take = partial(_take, ref(self))  # parameters do not hold the sums, which are freed with the engine
        self._hooks = {
            parameter: parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            for parameter in parameters
        }

    def take(self, parameter: torch.Tensor) -> None:
        """Add a parameter's gradient to its sum, and free it."""
        gradient = parameter.grad
        if gradient is None or not isinstance(parameter, nn.Parameter):
            return
        parameter.grad = None
        total = self._sums.get(parameter)
        if total is None:
            self._sums[parameter] = gradient.to(self._dtype)
        else:
            total.add_(gradient)

    def has(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter's gradients are summed here."""
        return parameter in self._hooks

    @property
    def has_unsummed(self) -> bool:
        """Whether parameters have gradients that were not taken."""
        return any(parameter.grad is not None for parameter in self._hooks)

    def of(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return a parameter's sum, in the sums' dtype; None if it had no gradient."""
        return self._sums.get(parameter)

    def items(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Return the sums so far, each with its parameter."""
        return self._sums.items()

    def set(self, parameter: nn.Parameter, total: torch.Tensor) -> None:
        """Continue from a copied or saved sum."""
        self._sums[parameter] = total.to(parameter.device, self._dtype, copy=True)

    def multiply(self, factor: float) -> None:
        """Multiply the sums so far by a factor."""
        for total in self._sums.values():
            total.mul_(factor)

    def write_back(self, factor: float) -> None:
        """Set the gradients that the optimizer reads: the sums times a factor, rounded once to its dtype."""
        while self._sums:
            parameter, total = self._sums.popitem()
            updated = self._masters.get(parameter, parameter)
            updated.grad = (total if factor == 1.0 else total.mul_(factor)).to(updated.dtype)

    def clear(self) -> None:
        """Drop the sums and any gradients that an interrupted backward left; take no more."""
        self.active = False
        self._sums.clear()
        for parameter in self._hooks:
            parameter.grad = None

    def hooks(self) -> list[RemovableHandle]:
        """Return the parameters' hooks, for removal."""
        return list(self._hooks.values())


def _take(sums: "ref[GradientSums]", parameter: torch.Tensor) -> None:
    owner = sums()
    if owner is not None and owner.active:
        owner.take(parameter)


def gradient_sums(
    model: nn.Module, accumulation: Accumulation, masters: Mapping[nn.Parameter, nn.Parameter]
) -> GradientSums | None:
    """Return sums for the parameters that need them; None if no parameter does.

    Parameters with a master need them; with several micro-batches, also those of lower precision than
    float32, or of another dtype than ``gradient_dtype``.
    """
    chosen = accumulation.gradient_dtype
    dtype: torch.dtype = getattr(torch, chosen or "float32")

    def needs(parameter: nn.Parameter) -> bool:
        if not parameter.requires_grad or not parameter.is_floating_point():
            return False
        if chosen:
            return parameter.dtype != dtype
        return parameter.dtype.itemsize < dtype.itemsize

    several = [parameter for parameter in model.parameters() if accumulation.several and needs(parameter)]
    wanted = list(dict.fromkeys([*masters, *several]))
    return GradientSums(wanted, dtype, masters) if wanted else None
