"""Serials of events (``event_labels.py``) for a PyTorch that does not copy a string into them (2.8 and 2.9).

That PyTorch still counts events, so a serial can be dated by the number of events before it:

    stamped           serial 7 at 2                serial 8 at 4
    events     alloc  alloc  |  free  segment_alloc  alloc  |  free
    counted    1      2         3                    4         5
    serials    6      6         7     7              7         8
"""

import numpy as np
import numpy.typing as npt
import torch

from memfit.records import Action

_COUNTED = (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM)


class EventCountStamps:
    """Serials dated by the event count of device 0's allocator when each was stamped.

    Threads are not distinguished: an event of one thread that follows a stamp of another gets the other's
    serial. If the script calls ``torch.cuda.reset_accumulated_memory_stats()``, the count is lost, and later
    events keep the label that was in force.

    Source: ``malloc``, ``free`` and ``free_block`` in c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.8.0: one
    count for each ``ALLOC``, ``FREE_REQUESTED``, ``FREE_COMPLETED`` and ``OOM`` of the history.
    """

    def __init__(self) -> None:
        self._serials: list[int] = []
        self._counts: list[int] = []
        self._start = _event_count()

    def stamp(self, serial: int) -> None:
        """Stamp a serial on the events from now on."""
        self._serials.append(serial)
        self._counts.append(_event_count() - self._start)

    def serials(self, actions: npt.NDArray[np.uint8]) -> npt.NDArray[np.int32]:
        """Return the serial of each event of the whole history; -1 before the first stamp."""
        counted = np.isin(actions, _COUNTED)
        before: npt.NDArray[np.int64] = np.cumsum(counted) - counted
        stamped_at = np.maximum.accumulate(np.array(self._counts, np.int64))
        latest = np.searchsorted(stamped_at, before, side="right")
        serials: npt.NDArray[np.int32] = np.array([-1, *self._serials], np.int32)
        return serials[latest]


def _event_count() -> int:
    statistics = torch._C._cuda_memoryStats(0)
    blocks, active = statistics["allocation"]["all"], statistics["active"]["all"]
    return int(blocks["allocated"] + blocks["freed"] + active["freed"] + statistics["num_ooms"])
