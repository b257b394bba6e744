"""Have GPU work of a stream finish late: when the host waits for it."""

from functools import partial

from memfit.ghost.runtime_bindings import GhostRuntime
from memfit.patching.after_import import call_after_import
from memfit.patching.patches import Patch, call_before

_EVENT = Patch("torch.cuda.streams:Event", "query", why="have work be done late, but before a script asks")
_STREAM = Patch("torch.cuda.streams:Stream", "query", why="have work be done late, but before a script asks")
_WORK = Patch(
    "torch.distributed:Work", "is_completed", why="have work be done late, but before a script asks"
)
_GROUPS = Patch(
    "torch.distributed.distributed_c10d",
    "destroy_process_group",
    also="torch.distributed",
    why="end all work before a process group ends",
)


def finish_stream_work_late(ghost: GhostRuntime) -> None:
    """Hold work from now on. A script that asks whether work is done, perhaps in a loop, waits for it."""
    from torch import distributed

    ghost.finish_late()
    for kind in (_EVENT, _STREAM):
        kind.install("query", partial(call_before, lambda self: self.synchronize()))
    if distributed.is_available():
        _WORK.install("is_completed", partial(call_before, lambda self: self.wait()))
        call_after_import("torch.distributed.distributed_c10d", _wait_before_groups_end)


def _wait_before_groups_end() -> None:
    """Have all work be done before a process group ends: it waits for the thread that watches its work."""
    import torch

    _GROUPS.install("destroy_process_group", partial(call_before, lambda *_, **__: torch.cuda.synchronize()))
