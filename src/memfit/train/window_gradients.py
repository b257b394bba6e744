"""The gradients of a window: in the parameters, or in sums of another dtype.

backward ──> parameter.grad                                   stays there until the update has read it
backward ──> parameter.grad (bf16) ──hook──> sum (float32)    per micro-batch; then the bf16 one is freed
end of the window:  sum ──> master.grad, or, rounded once, parameter.grad
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from memfit.errors import UsageError
from memfit.recording.optimizer_accessors import drop_gradients
from memfit.strategies.accumulation import Accumulation


class WindowGradients:
    """The gradients of an optimizer's parameters, from a window's first backward to its update.

    Args:
        optimizer: updates the parameters.
        sums: hold the gradients that are not summed in their parameters' dtype.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, sums: "GradientSums | None") -> None:
        self._optimizer, self.sums = optimizer, sums
        self.kept: KeptGradients | None = None
        """Gradients that are zeroed in place."""

    def take(self) -> None:
        """Sum the gradients of backwards from here on, in addition to existing ones."""
        if self.sums is not None:
            self.sums.active = True

    def begin(self) -> None:
        """Prepare for a window's first backward: drop gradients of backwards before it."""
        if self._with_gradients() or (self.sums is not None and self.sums.has_unsummed):
            self.clear()
        self.take()

    def items(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the gradients so far, each with its parameter."""
        if self.sums is not None:
            yield from self.sums.items()
        for parameter in self._with_gradients():
            if parameter.grad is not None:
                yield parameter, parameter.grad

    def set(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        """Continue a window from a copied or saved gradient."""
        if self.sums is not None and self.sums.has(parameter):
            self.sums.set(parameter, gradient)
        elif parameter.grad is None:
            parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)
        else:
            parameter.grad.copy_(gradient)
        if self.kept is not None:
            self.kept.notice(parameter)

    def multiply(self, factor: float) -> None:
        """Multiply the gradients so far by a factor."""
        if self.sums is not None:
            self.sums.multiply(factor)
        gradients = [each.grad for each in self._with_gradients() if each.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def finish(self, correction: float) -> None:
        """Multiply the gradients by a factor, and leave them where the optimizer reads them.

        Raises:
            UsageError: a gradient is not summed in float32 like the others.
        """
        if self.sums is not None:
            self._expect_all_summed(self.sums)
            self.sums.write_back(correction)
        elif correction != 1.0:
            self.multiply(correction)

    def clear(self) -> None:
        """Drop all gradients, or zero those that stay allocated."""
        if self.kept is not None:
            self.kept.clear()
        else:
            drop_gradients(self._optimizer)
        if self.sums is not None:
            self.sums.clear()

    def hooks(self) -> list[RemovableHandle]:
        """Return the hooks on parameters: handles, which keep nothing alive."""
        return [hook for each in (self.sums, self.kept) if each is not None for hook in each.hooks()]

    def _with_gradients(self) -> list[nn.Parameter]:
        kept = self.kept
        return [
            each
            for group in self._optimizer.param_groups
            for each in group["params"]
            if each.grad is not None and (kept is None or kept.is_used(each))
        ]

    def _expect_all_summed(self, sums: "GradientSums") -> None:
        for parameter in self._with_gradients():
            if parameter.dtype.itemsize < torch.float32.itemsize and not sums.has(parameter):
                raise UsageError(
                    f"A parameter of shape {tuple(parameter.shape)} has a gradient, but was frozen "
                    "(requires_grad=False) when the engine was created. The engine sums gradients "
                    "in float32 only for parameters that were trainable then. Unfreeze parameters before "
                    "creating the engine."
                )


class _GradientHooks:
    """Has ``notice`` called with each of some parameters whose gradient a backward has completed.

    Parameters do not hold this object, which is freed with the engine.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        notice = partial(_notice, ref(self))
        self._hooks = {
            each: each.register_post_accumulate_grad_hook(notice)  # type: ignore[no-untyped-call]
            for each in parameters
        }

    def hooks(self) -> list[RemovableHandle]:
        """Return the parameters' hooks, for removal."""
        return list(self._hooks.values())

    def notice(self, parameter: torch.Tensor) -> None:
        """Do nothing: subclasses take or count the gradient."""


def _notice(hooks: "ref[_GradientHooks]", parameter: torch.Tensor) -> None:
    owner = hooks()
    if owner is not None:
        owner.notice(parameter)


class GradientSums(_GradientHooks):
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
        super().__init__(parameters)

    def notice(self, parameter: torch.Tensor) -> None:
        """Add a parameter's gradient to its sum, and free it."""
        gradient = parameter.grad
        if not self.active or gradient is None or not isinstance(parameter, nn.Parameter):
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


def gradient_sums_of_model(
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


class KeptGradients(_GradientHooks):
    """Gradients that stay allocated from one window to the next, and which of them a backward has added to.

    A DistributedDataParallel keeps gradients in the buckets that it reduces, which stay allocated anyway. A
    gradient that is dropped would be allocated anew beside them by the next backward.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._used: set[torch.Tensor] = set()
        super().__init__(parameters)

    def clear(self) -> None:
        """Zero the gradients that were used, or drop those that cannot be kept, because they are sparse."""
        kept = []
        for parameter in self._used:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = None
            elif parameter.grad is not None:
                kept.append(parameter.grad)
        if kept:
            torch._foreach_zero_(kept)
        self._used.clear()

    def notice(self, parameter: torch.Tensor) -> None:
        """Count a parameter's gradient as used."""
        self._used.add(parameter)

    def is_used(self, parameter: nn.Parameter) -> bool:
        """Return whether a backward has added to a parameter's gradient, or it is not kept here."""
        return parameter in self._used or parameter not in self._hooks
