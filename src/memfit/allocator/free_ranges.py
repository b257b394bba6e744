"""The free ranges of the device's segments, by address.

    segment 0x7000                                  segment 0xb000
    |--- live ---|--- free ---|-- awaiting --|      |------- free -------|
    0x7000       0x8000       0xa000         0xb000                      0xc000

Two free blocks that touch are one, unless a segment ends between them: cudaMalloc may well return
neighbours, which PyTorch never merges. All mapped expandable memory counts as one segment: a
reservation is larger than the device, so between two of them some address is always unmapped.
"""

from bisect import bisect_right
from collections.abc import Iterator

from memfit.errors import FileFormatError
from memfit.records import Action, Events

EXPANDABLE = -1
"""The segment of all mapped memory."""


class ImpossibleEventError(Exception):
    """The event contradicts the rest of the history; the message gives the reason, the caller the event."""


def impossible_event_error(events: Events, position: int, reason: ImpossibleEventError) -> FileFormatError:
    """Return an error that names the impossible event of a history."""
    action = Action(events.action[position]).name.lower()
    address, size = int(events.address[position]), int(events.size[position])
    return FileFormatError(
        f"Cannot replay this trace. Event {position:,} of {len(events):,} (kind {action}, {size:,} bytes at "
        f"{address:#x}) is impossible: {reason}. Either the allocator history is incomplete, or the run "
        "used allocator settings that differ from those in the trace. Record the run again from its start."
    )


class FreeRanges:
    """Free blocks, half-open ``[start, stop)``, found by either end.

    Blocks in use are not kept here: the caller that takes one keeps its stop and its segment.
    """

    __slots__ = ("_order", "_starts", "_stops")

    def __init__(self) -> None:
        self._starts: dict[int, tuple[int, int]] = {}  # start -> (stop, segment)
        self._stops: dict[int, int] = {}  # stop -> start
        self._order: list[int] = []  # starts in order, as of the last unmapping that asked for it

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """Return start, stop and segment of every free block, in no order."""
        return ((start, stop, segment) for start, (stop, segment) in self._starts.items())

    def take(self, start: int) -> tuple[int, int] | None:
        """Remove the free block that starts there; return its stop and segment, or None without one."""
        block = self._starts.pop(start, None)
        if block is not None:
            del self._stops[block[0]]
        return block

    def put(self, start: int, stop: int, segment: int) -> None:
        """Add a free block without merging it: the remainder of a split."""
        if start in self._starts or stop in self._stops:
            raise ImpossibleEventError("its memory overlaps a free block")
        self._starts[start] = stop, segment
        self._stops[stop] = start

    def release(self, start: int, stop: int, segment: int) -> None:
        """Add a free block and merge it with the free neighbours of its segment.

        Source: ``try_merge_blocks``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
        """
        before = self._stops.get(start)
        if before is not None and self._starts[before][1] == segment:
            del self._starts[before], self._stops[start]
            start = before
        after = self._starts.get(stop)
        if after is not None and after[1] == segment:
            del self._starts[stop], self._stops[after[0]]
            stop = after[0]
        self.put(start, stop, segment)

    def add_segment(self, start: int, stop: int) -> None:
        """Add a segment from cudaMalloc, all free."""
        self.put(start, stop, start)

    def remove_segment(self, start: int, stop: int) -> None:
        """Remove a segment that was released with cudaFree: it must be one free block."""
        if self.take(start) != (stop, start):
            raise ImpossibleEventError("there is no entirely free segment of this size at this address")

    def map(self, start: int, stop: int) -> None:
        """Add mapped memory to an expandable segment."""
        self.release(start, stop, EXPANDABLE)

    def unmap(self, start: int, stop: int) -> None:
        """Remove whole handles from a free block of an expandable segment; the rest stays free."""
        around = self._mapped_around(start, stop)
        if around is None:
            # PyTorch unmaps in bursts, at most once per free block: one sorted order serves a whole burst,
            # and a block that is not in it needs a new one.
            self._order = sorted(self._starts)
            around = self._mapped_around(start, stop)
        if around is None:
            raise ImpossibleEventError("some of this memory is already unmapped, or still in use")
        end, _ = self._starts.pop(around)
        del self._stops[end]
        if around < start:
            self.put(around, start, EXPANDABLE)
        if stop < end:
            self.put(stop, end, EXPANDABLE)

    def _mapped_around(self, start: int, stop: int) -> int | None:
        """Return the start of the free mapped block that holds ``[start, stop)``."""
        index = bisect_right(self._order, start) - 1
        around = self._order[index] if index >= 0 else -1
        end, segment = self._starts.get(around, (0, 0))
        return around if segment == EXPANDABLE and stop <= end else None
