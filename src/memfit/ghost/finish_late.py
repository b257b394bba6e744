"""Have GPU work of a stream finish late: when the host waits for it."""

import functools
from typing import Any

from memfit.ghost.ffi import Ghost


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


def _waiting(query: Any, wait: Any) -> Any:
    """Return a method that waits before it asks."""

    @functools.wraps(query)
    def waited(self: Any) -> bool:
        wait(self)
        return bool(query(self))

    return waited
