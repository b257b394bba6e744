"""A module and a loss on its result, slice by slice: the result and its gradient never exist whole.

    forward     for each slice: module, loss, gradients: the inputs' into one buffer, the parameters' summed
    backward    gradients * the gradient of the loss; nothing is computed twice

In float16, gradients need the loss scale, which only the backward knows; without it they would be zero:

    forward     for each slice: module, loss
    backward    for each slice: module, loss, gradients of the scaled loss
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from memfit.errors import UsageError
from memfit.random_state import DrawnRandomNumbers
from memfit.strategies.mechanisms.in_place_gradient_accumulation import (
    SumGradientsInPlaceMode,
    autocast_dtype,
    autocast_to,
)
from memfit.strategies.mechanisms.inspect_tensors import leaves_beside, tensor_version

Loss = Callable[[Any, tuple[torch.Tensor, ...]], Any]
"""Takes the module's result and the targets of a slice; returns a sum, or a pair of a sum and its divisor."""


@dataclass(frozen=True)
class SlicedLoss:
    """What is computed for each slice.

    Args:
        head: the module.
        loss: the loss.
        chunks: into how many slices the first dimension is divided, if it is long enough.
        gradient_dtype: the dtype in which gradients of the parameters are summed; None for float32, or their
            own if that is wider.
        divisor: by what the loss of each slice is divided already.
    """

    head: nn.Module
    loss: Loss
    chunks: int
    gradient_dtype: torch.dtype | None
    divisor: torch.Tensor | None = None

    def __call__(
        self, inputs: torch.Tensor, targets: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the sum of the slices' losses, and of their divisors if the loss returns any.

        Raises:
            UsageError: the head or the loss cannot be computed in slices.
        """
        totals = _Totals()
        parameters = [each for each in self.head.parameters() if each.requires_grad]
        if torch.is_grad_enabled() and (inputs.requires_grad or parameters):
            total: torch.Tensor = _Sliced.apply(self, totals, inputs, len(targets), *targets, *parameters)
            return total, totals.divisor
        self.evaluate(inputs, targets, totals)
        return totals.loss, totals.divisor

    def evaluate(self, inputs: torch.Tensor, targets: tuple[torch.Tensor, ...], totals: "_Totals") -> None:
        """Compute the losses without gradients.

        Autocast's cache is left out: PyTorch 2.14 does not use casts again that were made without gradients,
        but earlier versions may. Weights of linear layers are cast once all the same.
        """
        kind = inputs.device.type
        casts = SumGradientsInPlaceMode(self.head.parameters(), None)
        with torch.no_grad(), autocast_to(kind, autocast_dtype(kind), cache=False), casts:
            for rows in self._slices(len(inputs)):
                self._run(inputs[rows], targets, rows, totals)

    def differentiate(
        self,
        inputs: torch.Tensor,
        targets: tuple[torch.Tensor, ...],
        parameters: tuple[torch.Tensor, ...],
        totals: "_Totals",
        upstream: torch.Tensor | None = None,
    ) -> list[torch.Tensor | None]:
        """Compute the losses and the gradients of their sum: the inputs' if they require it, the parameters'.

        Args:
            inputs: of n rows.
            targets: of n rows each.
            parameters: those of the head that require gradients.
            totals: is added to.
            upstream: the gradient of the sum; 1 by default.
        """
        sums = SumGradientsInPlaceMode(parameters, self._dtype_of_sums(parameters, len(inputs)))
        wanted = [sums.anchor, *parameters]
        buffer = torch.zeros_like(inputs) if inputs.requires_grad else None
        differentiable = False
        for rows in self._slices(len(inputs)):
            part = inputs[rows].detach().requires_grad_(inputs.requires_grad)
            with torch.enable_grad(), saved_tensors_hooks(_same, _same), sums:
                loss = self._run(part, targets, rows, totals)
            if not loss.requires_grad:  # a constant, where nothing in the slice counts
                continue
            if not differentiable:
                for leaf in leaves_beside(loss, (part, *wanted)):
                    raise UsageError(
                        f"ChunkedHead: head or loss use a tensor of shape {tuple(leaf.shape)} that requires "
                        "a gradient and is not a parameter of the head: its gradient would be lost. Detach "
                        "it, or pass as the head a module that contains it, too."
                    )
                differentiable = True
            # Nothing here holds the gradients of a slice while the next one runs.
            if buffer is None:
                sums.add_all(_gradients(loss, wanted, upstream)[1:])
            else:
                _store(_gradients(loss, [part, *wanted], upstream), buffer[rows], sums)
        if not differentiable:
            raise UsageError(
                "ChunkedHead: the loss does not depend on the head's result, so it has no gradients. Return "
                "a loss that was not detached."
            )
        return [buffer, *sums.take()]

    def needs_scaled_loss(self, inputs: torch.Tensor) -> bool:
        """Return whether gradients may be computed in float16, whose range needs the loss scale."""
        lower = autocast_dtype(inputs.device.type)
        own = [inputs.dtype, *(each.dtype for each in self.head.parameters())]
        return torch.float16 in (own if lower is None else [lower])

    def _slices(self, rows: int) -> Iterator[slice]:
        """Yield slices of equal lengths, or as equal as possible: one at least."""
        number = max(min(self.chunks, rows), 1)
        bounds = [rows * index // number for index in range(number + 1)]
        return map(slice, bounds, bounds[1:])

    def _run(
        self, part: torch.Tensor, targets: tuple[torch.Tensor, ...], rows: slice, totals: "_Totals"
    ) -> torch.Tensor:
        first = rows.start == 0
        before = self._buffers() if first else {}
        own = tuple(each[rows] for each in targets)
        loss = totals.add(self.loss(self.head(part), own), len(part))
        changed = [name for name, state in self._buffers().items() if before[name] != state] if first else []
        if changed:
            raise UsageError(
                f"ChunkedHead: the forward of {type(self.head).__name__} changes its buffer {changed[0]!r}, "
                "and would change it once in each slice. Call the head in evaluation mode, or leave out the "
                "part that has this buffer."
            )
        return loss

    def _buffers(self) -> dict[str, tuple[int, int]]:
        return {name: (id(each), tensor_version(each)) for name, each in self.head.named_buffers()}

    def _dtype_of_sums(self, parameters: tuple[torch.Tensor, ...], rows: int) -> torch.dtype | None:
        several = min(self.chunks, rows) > 1
        low = any(each.dtype.itemsize < torch.float32.itemsize for each in parameters)
        return self.gradient_dtype or (torch.float32 if several and low else None)


class _Totals:
    """The sums over slices."""

    def __init__(self) -> None:
        self.loss: torch.Tensor
        self.divisor: torch.Tensor | None = None
        self._first = True

    def add(self, result: Any, rows: int) -> torch.Tensor:
        """Add what a loss returned for a slice, and return its sum."""
        match result:
            case (loss, divisor):
                pass
            case loss:
                divisor = None
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.is_floating_point():
            raise UsageError(
                f"ChunkedHead: the loss of a slice must be a floating-point tensor of no dimensions, the sum "
                f"over its {rows} entries, or a pair of this sum and its divisor, not {_described(loss)}."
            )
        if isinstance(divisor, torch.Tensor) and divisor.requires_grad:
            raise UsageError(
                "ChunkedHead: the divisor that the loss returns requires a gradient, which would be lost. "
                "Detach it, or use the plain head."
            )
        own = loss.detach()
        if own.dtype.itemsize < torch.float32.itemsize:
            own = own.float()
        if self._first:
            self.loss = own
            self.divisor = None if divisor is None else torch.as_tensor(divisor, device=own.device)
        else:
            self.loss = self.loss + own
            self.divisor = None if self.divisor is None or divisor is None else self.divisor + divisor
        self._first = False
        return loss


class _Sliced(torch.autograd.Function):
    """The sum of the slices' losses. Gradients of inputs and parameters are those of this one function."""

    @staticmethod
    def forward(
        ctx: Any, work: SlicedLoss, totals: _Totals, inputs: torch.Tensor, count: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        targets, parameters = tensors[:count], tensors[count:]
        ctx.count, ctx.again = count, None
        ctx.reduction = len(inputs), () if work.divisor is None else (work.divisor,)  # for ``loss_divisor``
        if not work.needs_scaled_loss(inputs):
            ctx.save_for_backward(*work.differentiate(inputs, targets, parameters, totals))
            return totals.loss
        draws = DrawnRandomNumbers.start((torch.default_generator,))
        work.evaluate(inputs, targets, totals)
        draws.keep_drawn()
        ctx.again = functools.partial(_again, work, draws, autocast_dtype(inputs.device.type), parameters)
        # Parameters too, so that a change of theirs before the backward is an error.
        ctx.save_for_backward(inputs, *tensors)
        return totals.loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UsageError(
                "ChunkedHead has no second derivatives (create_graph=True), because it computes gradients in "
                "the forward. Use the plain head where a gradient is differentiated."
            )
        if ctx.again is not None:
            inputs, *parameters = ctx.again(upstream, *ctx.saved_tensors[: 1 + ctx.count])
        else:
            # Freed after this backward, so they can become the gradients themselves, unless another follows.
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            inputs, *parameters = [
                each if each is None else each * upstream.to(each.dtype) if keep else each.mul_(upstream)
                for each in ctx.saved_tensors
            ]
        return None, None, inputs, None, *[None] * ctx.count, *parameters


def _again(
    work: SlicedLoss,
    draws: DrawnRandomNumbers,
    lower: torch.dtype | None,
    parameters: tuple[torch.Tensor, ...],
    upstream: torch.Tensor,
    inputs: torch.Tensor,
    *targets: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Return the gradients, computed in the backward from that of the loss."""
    with draws.replay(), autocast_to(inputs.device.type, lower):
        return work.differentiate(inputs, targets, parameters, _Totals(), upstream)


def _gradients(
    loss: torch.Tensor, wanted: list[torch.Tensor], upstream: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """Return the gradients of a slice's loss, None where it does not depend on a tensor."""
    given = None if upstream is None else upstream.to(loss.dtype)
    with autocast_to(loss.device.type, None):  # as any backward
        return list(torch.autograd.grad(loss, wanted, given, allow_unused=True))


def _store(gradients: list[torch.Tensor | None], place: torch.Tensor, sums: SumGradientsInPlaceMode) -> None:
    """Copy the gradient of a slice's inputs to its place, and add those of the parameters."""
    own, _, *of_parameters = gradients
    if own is not None:
        place.copy_(own)
    sums.add_all(of_parameters)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    """Pack and unpack what a slice saves: it is freed soon, and neither offloaded nor recomputed."""
    return tensor


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"a {type(value).__name__}"
