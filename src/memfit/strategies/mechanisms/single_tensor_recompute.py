"""Recompute single tensors of a region, each from results that are kept.

    forward     conv ── a ── batch_norm ── b ── relu ── c ── conv ── d        kept: a and d, but not b and c
    backward    of the second conv:  c = relu(batch_norm(a))

While a region's forward runs, a tape notes each operation as PyTorch dispatched it. In place of a tensor that
is not kept, autograd saves how to make it. An operation runs again when the backward first needs what it
makes, and not a second time. The module's own code does not run again: it changes no buffers and draws no
random numbers.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from memfit.patching.after_import import call_after_import
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.random_state import torch_generator_positions
from memfit.recording.operation_interception import OperationInterceptionMode
from memfit.recording.tensor_storage import storage_of
from memfit.records import LEAST_RECOMPUTED, is_recomputable_operation
from memfit.strategies.mechanisms.replayable_operations import (
    FlattenedArguments,
    NotedContent,
    NotedOperation,
    NotedTensor,
    NotedView,
    PlaceInStorage,
    copy_of_storage,
    flatten_values,
)

_STATISTICS = {
    "native_batch_norm",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "batch_norm_update_stats",
    "batch_norm_gather_stats",
    "batch_norm_gather_stats_with_counts",
}
"""Operations that write to ``running_mean`` and ``running_var``; their schemas do not say so."""


def recompute_single_tensors(is_kept: Callable[[Any], bool], forward: Callable[[], Any]) -> Any:
    """Run a region so that the backward makes again, one by one, the tensors that are not kept.

    Args:
        is_kept: whether the results of an operation are kept; asked once for each call of one, in order.
        forward: the region's.

    >>> x = torch.ones(4096, requires_grad=True)
    >>> y = recompute_single_tensors(
    ...     lambda operation: "exp" in str(operation), lambda: (x * 2).exp().sigmoid()
    ... )
    >>> y.sum().backward()  # sigmoid runs again, on the result of exp
    """
    tape = _Tape(is_kept)
    try:
        with (
            saved_tensors_hooks(tape.save, _read),
            OperationInterceptionMode(tape.run),
            _observe_triton_launches(tape.may_write),
        ):
            return forward()
    finally:
        tape.forget()  # nothing but what autograd saved is to hold notes


class _Tape:
    def __init__(self, is_kept: Callable[[Any], bool]) -> None:
        self._is_kept = is_kept
        self._stored: dict[int, _Stored] = {}  # by the storage's address

    def save(self, tensor: torch.Tensor) -> NotedView | NotedTensor:
        """Return what autograd is to keep in place of a tensor."""
        noted = self._noted(tensor) if _is_plain(tensor) else None
        if noted is not None:
            return NotedView(noted, PlaceInStorage.of(tensor))
        # A result refers to the node that is to keep it: without a backward, neither would ever be freed.
        return NotedTensor(tensor if tensor.is_leaf else tensor.detach())

    def forget(self) -> None:
        """Forget all storages."""
        self._stored.clear()

    def run(self, operation: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation of the forward, and note it unless its results are kept."""
        is_kept, kind = self._is_kept(operation), _kind(operation)
        leaves, layout = FlattenedArguments.flatten(args, kwargs)
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        if kind.is_view or not all(map(_is_plain, tensors)):
            return operation(*args, **kwargs)
        before = {
            id(each): self._before_write(each, is_read=kind.creates)
            for place, name in kind.written
            for each in flatten_values(_argument(place, name, args, kwargs))
            if isinstance(each, torch.Tensor)
        }
        drawn = torch_generator_positions() if kind.may_draw else None
        result = operation(*args, **kwargs)
        created = self._created(flatten_values(result), tensors)
        changed = {
            index: each
            for index, each in enumerate(leaves)
            if id(each) in before and self._noted(each) is not None
        }
        is_kept |= not kind.can_run_again or (kind.may_draw and drawn != torch_generator_positions())
        if is_kept:
            for each in changed.values():
                self._of(each).noted = None
        elif created or changed:
            arguments = [
                NotedView(before.get(id(each)) or self._content(each), PlaceInStorage.of(each))
                if isinstance(each, torch.Tensor)
                else each
                for each in leaves
            ]
            written = tuple(index for index, each in enumerate(leaves) if id(each) in before)
            step = NotedOperation(operation, arguments, layout, written)
            for contents, some in ((step.creates, created), (step.changes, changed)):
                for index, each in some.items():
                    content = self._of(each).noted = NotedContent(None, step)
                    contents[index] = weakref.ref(content)
        return result

    def may_write(self, args: Any) -> None:
        """Keep what some tensors will hold: a kernel that PyTorch does not dispatch is about to run."""
        for each in tree_leaves(args):
            if isinstance(each, torch.Tensor) and _is_plain(each):
                self._before_write(each)
                self._of(each).noted = None

    def _created(self, results: list[Any], passed: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return by number the results in new storages that are large enough to be noted."""
        known = {storage_of(each)._cdata for each in passed}
        return {
            index: each
            for index, each in enumerate(results)
            if isinstance(each, torch.Tensor)
            and _is_plain(each)
            and storage_of(each).nbytes() >= LEAST_RECOMPUTED
            and storage_of(each)._cdata not in known
            and storage_of(each)._cdata not in self._stored
        }

    def _noted(self, tensor: torch.Tensor) -> NotedContent | None:
        stored = self._stored.get(storage_of(tensor)._cdata)
        return stored.noted if stored is not None else None

    def _of(self, tensor: torch.Tensor) -> "_Stored":
        storage = storage_of(tensor)
        address = storage._cdata
        if address not in self._stored:
            # PyTorch keeps a storage's Python object for as long as the storage itself.
            self._stored[address] = _Stored(weakref.ref(storage, partial(_forget, self._stored, address)))
        return self._stored[address]

    def _content(self, tensor: torch.Tensor) -> NotedContent:
        """Return what a tensor's storage holds now."""
        stored = self._of(tensor)
        content = stored.noted or (stored.kept() if stored.kept is not None else None)
        if content is None:
            content = NotedContent(NotedTensor(tensor.detach()))
            stored.kept = weakref.ref(content)
        return content

    def _before_write(self, tensor: torch.Tensor, *, is_read: bool = False) -> NotedContent | None:
        """Return what a tensor's storage holds before an operation writes to it: a copy of what is kept."""
        stored = self._of(tensor)
        if stored.noted is not None:
            return stored.noted
        content = stored.kept() if stored.kept is not None else None
        if content is None and is_read:
            content = NotedContent(None)
        if content is not None:  # noted operations need it, or this one will
            content.hold(copy_of_storage(tensor))
            stored.kept = None
        return content


class _Stored:
    """What a tape knows of a storage that exists."""

    __slots__ = ("_end", "kept", "noted")

    def __init__(self, end: "weakref.ref[torch.UntypedStorage]") -> None:
        self._end = end  # forgets it
        self.noted: NotedContent | None = None
        """What it holds, if that is not kept."""
        self.kept: weakref.ref[NotedContent] | None = None
        """What it holds, if that is kept and noted operations read it."""


def _read(saved: NotedView | NotedTensor) -> torch.Tensor:
    if isinstance(saved, NotedView):
        saved.content.make()
    return saved.tensor()


def _forget(stored: dict[int, _Stored], address: int, _: object) -> None:
    stored.pop(address, None)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


@dataclass(frozen=True, slots=True)
class _OperationKind:
    """What a tape asks about an operation, whatever its arguments."""

    is_view: bool
    may_draw: bool
    """Whether it may draw random numbers."""
    can_run_again: bool
    creates: bool
    """Whether some result is not an argument."""
    written: tuple[tuple[int, str], ...]
    """Places and names of the arguments that it changes in place."""


@cache
def _kind(operation: Any) -> _OperationKind:
    hidden = operation._overloadpacket.__name__ in _STATISTICS
    return _OperationKind(
        is_view=operation.is_view,
        may_draw=torch.Tag.nondeterministic_seeded in operation.tags,
        can_run_again=is_recomputable_operation(str(operation)),
        creates=any(each.alias_info is None for each in operation._schema.returns),
        written=tuple(
            (place, each.name)
            for place, each in enumerate(operation._schema.arguments)
            if (each.alias_info is not None and each.alias_info.is_write)
            or (hidden and each.name in ("running_mean", "running_var"))
        ),
    )


def _argument(place: int, name: str, args: Any, kwargs: Any) -> Any:
    return args[place] if place < len(args) else kwargs.get(name)


_KERNEL = Patch("triton.runtime.jit:JITFunction", "run", why="see the arguments of Triton kernels")


@contextmanager
def _observe_triton_launches(about_to_run: Callable[[Any], None]) -> Iterator[None]:
    """Within the block, call a function with the arguments of each Triton kernel before it runs."""
    hooks = InstalledHooks()

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        about_to_run((args, kwargs))
        return original(*args, **kwargs)

    hooks.on_removal(call_after_import("triton.runtime.jit", lambda: hooks.wrap(_KERNEL, "run", run)))
    try:
        yield
    finally:
        hooks.remove()
