"""Recompute a region in parts: the last one first, each from the region's beginning.

    forward     ── part 0 ──|── part 1 ──|── part 2 ──>         only the inputs are kept
    backward    run up to part 2, and keep what that saves;     backward of part 2
                run up to part 1, and keep what that saves;     backward of part 1
                run part 0, and keep what that saves;           backward of part 0

``torch.utils.checkpoint`` recomputes a region at once: at the beginning of its backward there is all that it
saves. Here there is what one part saves. The parts before run once more, and results are equal bit for bit.
"""

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

_SAME_EACH_TIME = "The module must compute the same each time it is called with the same arguments."


def recompute_in_parts(run: Callable[..., Any], inputs: Sequence[Any], starts: Sequence[nn.Module]) -> Any:
    """Run a function so that backward recomputes it in parts.

    Args:
        run: the function. Its later calls must draw the same random numbers.
        inputs: its arguments. Only they are kept, as autograd keeps tensors.
        starts: modules that it calls; a part begins with the first call of each.
    """
    return _Parts(run, inputs).first(starts)


class _Parts:
    def __init__(self, run: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self._run = run
        self._tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        self._inputs = [None if isinstance(each, torch.Tensor) else (each,) for each in inputs]
        devices = {each.device.type for each in self._tensors} | {"cpu"}
        self._autocast = [
            _autocast(each) for each in sorted(devices) if torch.amp.is_autocast_available(each)
        ]
        self._device = torch.get_default_device()
        self._slots: list[weakref.ref[_Slot]] = []
        """Of the tensors that autograd saved, in this order."""
        self._starts: list[int] = []
        """How many tensors were saved before each part but the first."""
        self._recomputed: weakref.WeakKeyDictionary[_Slot, torch.Tensor] = weakref.WeakKeyDictionary()
        """Of one part, as long as autograd may read them."""

    def first(self, starts: Sequence[nn.Module]) -> Any:
        """Run the function for the first time."""
        tensors, self._tensors = self._tensors, []
        needed = torch.empty(
            0, requires_grad=True
        )  # without it autograd saves nothing if no input needs gradients
        # The result itself: its node alone, without it, would lose what it has saved (up to PyTorch 2.12).
        self._saved_inputs = _SavedInputs.apply(needed, *tensors)
        with ExitStack() as stack:
            for module in starts:
                stack.enter_context(self._first_call(module))
            stack.enter_context(saved_tensors_hooks(self._save, self._read))
            return self._run(*self._arguments(iter(tensors)))

    def _arguments(self, tensors: Iterator[torch.Tensor]) -> list[Any]:
        return [next(tensors) if each is None else each[0] for each in self._inputs]

    @contextmanager
    def _first_call(self, module: nn.Module) -> Iterator[None]:
        def begin(*_: Any) -> None:
            self._starts.append(len(self._slots))
            handle.remove()

        handle = module.register_forward_pre_hook(begin, prepend=True)
        try:
            yield
        finally:
            handle.remove()

    def _save(self, tensor: torch.Tensor) -> "_Slot":
        slot = _Slot(len(self._slots), tensor)
        self._slots.append(weakref.ref(slot))
        return slot

    def _read(self, slot: "_Slot") -> torch.Tensor:
        if slot not in self._recomputed:
            part = bisect_right(self._starts, slot.number)
            bounds = [0, *self._starts, len(self._slots)]
            self._recompute(bounds[part], bounds[part + 1])
        return self._recomputed.pop(slot)

    def _recompute(self, start: int, end: int) -> None:
        """Run the function up to the end of a part, and keep what autograd saves in it."""
        number = 0

        def keep(tensor: torch.Tensor) -> None:
            nonlocal number
            slot = self._slots[number]()
            if slot is not None and number >= start:  # None: a backward inside the forward has read it
                slot.expect(tensor)
                self._recomputed[slot] = tensor.detach()
            number += 1
            if number == end:
                raise _Complete

        with ExitStack() as stack:
            for context in self._autocast:
                stack.enter_context(context())
            if torch.get_default_device() != self._device:
                stack.enter_context(self._device)
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(keep, _no_backward_inside))
            try:
                self._run(*self._arguments(iter(self._saved_inputs.grad_fn.saved_tensors)))
            except _Complete:
                return
        raise CheckpointError(
            f"memfit: the forward saved {len(self._slots)} tensors for its backward, its recomputation "
            f"{number}. {_SAME_EACH_TIME}"
        )


class _Slot:
    """The place of a tensor that autograd saved; dies with autograd's interest in it."""

    __slots__ = ("__weakref__", "_looks", "number")

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number = number
        self._looks = _looks(tensor)

    def expect(self, tensor: torch.Tensor) -> None:
        """Check that a recomputed tensor has the shape, dtype and device of the one that autograd saved."""
        if _looks(tensor) != self._looks:
            raise CheckpointError(
                f"memfit: the forward saved a tensor of {self._looks} for its backward, its recomputation "
                f"one of {_looks(tensor)}. {_SAME_EACH_TIME}"
            )


class _SavedInputs(torch.autograd.Function):
    """Keeps tensors as autograd does: seen by hooks, and checked for changes in place."""

    @staticmethod
    def forward(ctx: Any, _needed: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(_ctx: Any, *_: torch.Tensor) -> Any:
        raise AssertionError("its result is used nowhere")


class _Complete(Exception):  # noqa: N818 - no error
    """Ends a recomputation."""


def _looks(tensor: torch.Tensor) -> str:
    return f"shape {list(tensor.shape)}, {tensor.dtype}, on {tensor.device}"


def _no_backward_inside(_: None) -> torch.Tensor:
    raise CheckpointError(
        "memfit: a module that computes gradients in its forward cannot be recomputed in parts. Leave out "
        "split_at."
    )


def _autocast(device: str) -> Callable[[], torch.autocast]:
    """Return what makes a context with the present settings of autocast on a device."""
    dtype, enabled = torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype, enabled, cached)
