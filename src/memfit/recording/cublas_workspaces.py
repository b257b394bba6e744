"""Identify the workspaces that PyTorch allocates for cuBLAS, whose addresses it does not expose.

PyTorch keeps one workspace per handle and stream until the script or memfit releases them:
Lightning does that after a fit. So they are the allocations that this release frees.
"""

from collections.abc import Callable

import torch

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.recording.allocator_history import AllocatorHistory
from memfit.recording.event_labels import LabelBook
from memfit.recording.owners import MemoryOwners

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
        moment, before = book.moment(), history.alive()
        release()
        after = history.alive()
        freed = {address: size for address, size in before.items() if address not in after}
        owners.record_cublas_workspaces(moment, freed)

    hooks.wrap(_WORKSPACES, _RELEASE, around)


def release_cublas_workspaces() -> None:
    """Release the cuBLAS workspaces, at the end of the run, as a script may."""
    getattr(torch._C, _RELEASE)()
