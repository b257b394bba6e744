"""Have GPU work of a stream finish late: when the host waits for it."""

import functools
from typing import Any

from memfit.ghost.ffi import Ghost
from memfit.patching.after_import import after_import
from memfit.patching.before_call import before


def finish_late(ghost: Ghost) -> None:
    """Hold work from now on. A script that asks whether work is done, perhaps in a loop, waits for it."""
    import torch
    from torch import distributed

    ghost.finish_late()
    for kind in (torch.cuda.Event, torch.cuda.Stream):
        kind.query = _waiting(kind.query, kind.synchronize)  # type: ignore[method-assign]
    if distributed.is_available():
        work: Any = distributed.Work
        work.is_completed = _waiting(work.is_completed, lambda self: self.wait())
        after_import("torch.distributed.distributed_c10d", _wait_before_groups_end)


def _wait_before_groups_end() -> None:
    """Have all work be done before a process group ends: it waits for the thread that watches its work."""
    import torch
    from torch import distributed
    from torch.distributed import distributed_c10d

    end = before(lambda *_, **__: torch.cuda.synchronize(), distributed_c10d.destroy_process_group)
    distributed.destroy_process_group = distributed_c10d.destroy_process_group = end


def _waiting(query: Any, wait: Any) -> Any:
    """Return a method that waits before it asks."""

    @functools.wraps(query)
    def waited(self: Any) -> bool:
        wait(self)
        return bool(query(self))

    return waited
