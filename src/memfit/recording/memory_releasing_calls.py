"""Calls of PyTorch that change memory: they reset peaks, empty a cache, release workspaces, leave autocast.

PyTorch does not expose the addresses of the workspaces that it allocates for cuBLAS. It keeps one per handle
and stream until the script or memfit releases them: Lightning does that after a fit. So they are the
allocations that this release frees.

Autocast makes copies of parameters in a lower dtype on first use, and drops them on exit:

    with torch.autocast("cuda", torch.bfloat16):
        model(x)          makes copies; the graph keeps those that its backward needs
    on exit               copies that only autocast still held are all freed at once, which identifies them

Source: ``cached_cast`` in aten/src/ATen/autocast_mode.cpp and ``autocast.__exit__`` in
torch/amp/autocast_mode.py, PyTorch 2.14.1: autocast caches copies of leaves that require gradients; the cache
cannot be read.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch, call_before
from memfit.recording.allocator_history import AllocatorHistory
from memfit.recording.event_labels import LabelBook
from memfit.recording.memory_owners import MemoryOwners
from memfit.records import Action, Category, Events, MarkKind

_RELEASE = "_cuda_clearCublasWorkspaces"
_WORKSPACES = Patch("torch._C", _RELEASE, why="learn the addresses of cuBLAS workspaces")


def record_released_workspaces(
    hooks: InstalledHooks, book: LabelBook, history: AllocatorHistory, owners: MemoryOwners
) -> None:
    """From now on, record what each release of the cuBLAS workspaces frees, as owners of memory."""

    def around(release: Callable[[], None]) -> None:
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            release()
            return
        moment, held = book.moment(), history.alive()
        release()
        after = history.alive()
        freed = {address: size for address, size in held.items() if address not in after}
        owners.record_cublas_workspaces(moment, freed)

    hooks.wrap(_WORKSPACES, _RELEASE, around)


def release_cublas_workspaces() -> None:
    """Release the cuBLAS workspaces, at the end of the run, as a script may."""
    getattr(torch._C, _RELEASE)()


_MARKED_CALLS = {
    "_cuda_resetPeakMemoryStats": MarkKind.RESET_PEAK,
    "_accelerator_resetPeakStats": MarkKind.RESET_PEAK,
    "_cuda_emptyCache": MarkKind.EMPTY_CACHE,
    "_accelerator_emptyCache": MarkKind.EMPTY_CACHE,
}
"""Functions of ``torch._C`` and the mark that a call of each leaves."""
_PEAKS = Patch("torch._C", *_MARKED_CALLS, why="mark where a script resets peaks or empties the cache")


def mark_memory_calls(hooks: InstalledHooks, book: LabelBook) -> None:
    """From now on, add a mark to the book at each such call."""

    def marker(kind: MarkKind) -> Callable[..., None]:
        return lambda *_args: book.mark(kind, 0)

    for name, kind in _MARKED_CALLS.items():
        hooks.replace(_PEAKS, name, partial(call_before, marker(kind)))


_AUTOCAST = Patch("torch.amp.autocast_mode:autocast", "__exit__", why="find autocast's copies of parameters")

EXIT_OP = "autocast exit"
COPY_OP = "autocast's copy of a parameter"


def label_autocast_exits(hooks: InstalledHooks, book: LabelBook) -> None:
    """From now on, label the events during each exit of an autocast block."""

    def exit_autocast(original: Callable[..., Any], *args: Any) -> Any:
        with book.doing(EXIT_OP):
            return original(*args)

    hooks.wrap(_AUTOCAST, "__exit__", exit_autocast)


def name_autocast_copies(events: Events, book: LabelBook) -> None:
    """Label the allocations freed on exit from autocast, in place, unless a graph has named them already."""
    exits = {index for index, label in enumerate(book.labels) if label.op == EXIT_OP}
    if not exits:
        return
    allocated_at: dict[int, int] = {}
    rows = zip(events.action.tolist(), events.address.tolist(), events.label.tolist(), strict=True)
    for position, (action, address, label) in enumerate(rows):
        if action == Action.ALLOC:
            allocated_at[address] = position
        elif action == Action.FREE_REQUESTED and label in exits and address in allocated_at:
            copy = allocated_at[address]
            if events.category[copy] == Category.UNKNOWN:
                events.category[copy] = Category.TEMPORARY
                events.label[copy] = book.add(replace(book.labels[events.label[copy]], op=COPY_OP))
