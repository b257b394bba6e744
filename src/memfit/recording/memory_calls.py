"""Calls of PyTorch that change memory: they reset peaks, empty the cache, or release cuBLAS workspaces.

PyTorch does not expose the addresses of the workspaces that it allocates for cuBLAS. It keeps one per handle
and stream until the script or memfit releases them: Lightning does that after a fit. So they are the
allocations that this release frees.
"""

from collections.abc import Callable
from functools import partial

import torch

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch, before
from memfit.recording.allocator_history import AllocatorHistory
from memfit.recording.event_labels import LabelBook
from memfit.recording.owners import MemoryOwners
from memfit.records import MarkKind

_RELEASE = "_cuda_clearCublasWorkspaces"
_WORKSPACES = Patch("torch._C", _RELEASE, why="learn the addresses of cuBLAS workspaces")


def record_released_workspaces(
    hooks: InstalledHooks, book: LabelBook, history: AllocatorHistory, owners: MemoryOwners
) -> None:
    """From now on, record what each release of the cuBLAS workspaces frees, as owners of memory.

    Args:
        hooks: registry of the changes to PyTorch.
        book: gives the moment of a release.
        history: asked before and after a release for the allocations that are alive.
        owners: to which the workspaces are added.
    """

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


def mark_calls(hooks: InstalledHooks, book: LabelBook) -> None:
    """From now on, add a mark to the book at each such call."""

    def marker(kind: MarkKind) -> Callable[..., None]:
        return lambda *_args: book.mark(kind, 0)

    for name, kind in _MARKED_CALLS.items():
        hooks.replace(_PEAKS, name, partial(before, marker(kind)))
