"""Sum the gradients of parameters over several backwards; a linear layer adds in place.

    autograd     gradient of a slice, added to the sum          two tensors of the parameter's size
    F.linear     sum.addmm_(gradient of the result, input)      one, if it is computed in the sum's dtype

While the sums are active, as a mode of PyTorch's functions, ``F.linear`` with a summed parameter as its
weight adds to the sum in its backward, and autograd sees no gradient of that weight.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


def autocast_dtype(kind: str) -> torch.dtype | None:
    """Return the dtype of autocast on a kind of device; None if it is off."""
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled else None


def autocast_to(kind: str, lower: torch.dtype | None, *, cache: bool = True) -> AbstractContextManager[Any]:
    """Return autocast to a dtype on a kind of device; off for None."""
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(kind, dtype=lower, enabled=lower is not None, cache_enabled=cache)


class SumGradientsInPlaceMode(TorchFunctionMode):
    """The sums of the parameters' gradients, and while it is active, linear layers that add to them.

    Args:
        parameters: whose gradients are summed.
        dtype: the dtype of the sums; None for each parameter's own.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], dtype: torch.dtype | None) -> None:
        super().__init__()
        self._dtype = dtype
        self._sums: dict[torch.Tensor, torch.Tensor | None] = dict.fromkeys(parameters)
        self._casts: dict[tuple[torch.Tensor, torch.dtype], torch.Tensor] = {}
        self.anchor = torch.empty(0, requires_grad=True)
        """Differentiate with respect to it, too: autograd runs only what leads to what it is asked for."""

    def add(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        """Add the gradient of a slice."""
        total = self._sums[parameter]
        if total is None:
            self._sums[parameter] = gradient.to(self._dtype or parameter.dtype)
        else:
            total.add_(gradient)

    def add_all(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients of all parameters, in their order; None for those that have none."""
        for parameter, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                self.add(parameter, gradient)

    def add_product(self, weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add the product of two matrices."""
        total = self._sums[weight]
        if total is not None and total.dtype == left.dtype:
            total.addmm_(left, right)
        else:
            self.add(weight, left.mm(right))

    def take(self) -> list[torch.Tensor | None]:
        """Return the sums in the parameters' dtypes and order, None for a parameter that was not used."""
        return [None if total is None else total.to(each.dtype) for each, total in self._sums.items()]

    def cast(self, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter in autocast's dtype, cast once for all slices."""
        if parameter.dtype in (dtype, torch.float64):  # autocast leaves float64 as it is
            return parameter.detach()
        if (parameter, dtype) not in self._casts:
            self._casts[parameter, dtype] = parameter.detach().to(dtype)
        return self._casts[parameter, dtype]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of PyTorch's; a linear layer's so that it adds to the sums."""
        if func is functional.linear and not torch.compiler.is_compiling():
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(
        self, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if weight not in self._sums or (bias is not None and bias not in self._sums):
            return functional.linear(inputs, weight, bias)
        lower = autocast_dtype(inputs.device.type)
        if lower is not None and inputs.dtype != torch.float64:
            inputs = inputs.to(lower)
        result: torch.Tensor = _SummedLinear.apply(self.anchor, inputs, weight, bias, self, lower)
        return result


class _SummedLinear(torch.autograd.Function):
    """``F.linear``, whose backward adds the gradients of weight and bias to their sums."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: torch.Tensor,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sums: SumGradientsInPlaceMode,
        lower: torch.dtype | None,
    ) -> torch.Tensor:
        low = weight.detach() if lower is None else sums.cast(weight, lower)
        low_bias = bias if bias is None or lower is None else sums.cast(bias, lower)
        ctx.sums, ctx.weight, ctx.bias = sums, weight, bias
        ctx.save_for_backward(inputs, low)
        return functional.linear(inputs, low, low_bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        ctx.sums.add_product(ctx.weight, flat.t(), inputs.reshape(-1, inputs.shape[-1]))
        if ctx.bias is not None:
            ctx.sums.add(ctx.bias, flat.sum(0))
        return None, gradient.matmul(weight) if ctx.needs_input_grad[1] else None, None, None, None, None
