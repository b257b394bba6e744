"""The allocator's state before the first event of a history.

memfit's own recorder starts before PyTorch allocates anything. A snapshot from elsewhere often does not:
recording was switched on after the model was built, or the ring buffer dropped the oldest events. A snapshot
also holds every segment at the end, so the events are undone from the last to the first.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from memfit.allocator.block_and_segment_sizes import SMALL_SIZE, round_size, should_split_block
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.free_ranges import EXPANDABLE, FreeRanges, ImpossibleEventError, impossible_event_error
from memfit.errors import FileFormatError
from memfit.records import Action, Events, Segment, Trace

Extent = tuple[int, int]
"""(stop, segment) of a block whose start is known."""


@dataclass(slots=True)
class InitialAllocatorState:
    """The allocator just before ``events[0]``."""

    layout: FreeRanges = field(default_factory=FreeRanges)
    live: dict[int, Extent] = field(default_factory=dict)
    """Blocks that tensors hold, by address."""
    pending: dict[int, Extent] = field(default_factory=dict)
    """Blocks that the script freed and another stream still uses, by address."""
    reserved: int = 0
    """Bytes, exact."""
    uncertain: int = 0
    """Bytes by which ``allocated`` may be too low: a block whose allocation is not in the history may have
    kept an unsplit remainder of up to 1 MiB. The uncertainty ends when those blocks are freed."""

    @property
    def allocated(self) -> int:
        """Bytes in live blocks."""
        return sum(stop - start for start, (stop, _) in self.live.items())


def reserved_bytes_changes(events: Events) -> npt.NDArray[np.int64]:
    """Return the change of reserved bytes at each event.

    Returns:
        ``n`` signed byte counts, 0 where no segment came or went.
    """
    grows = np.isin(events.action, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP))
    shrinks = np.isin(events.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP))
    return np.where(grows, events.size, 0) - np.where(shrinks, events.size, 0)


def reconstruct_initial_state(trace: Trace, config: AllocatorConfig) -> InitialAllocatorState:
    """Reconstruct what was allocated before the first event of a trace.

    Returns:
        Empty if the events account for every byte reserved at the end: PyTorch reserves before it
        allocates. Also empty where there are no segments (``AllocatorConfig.has_segments``).
    """
    if not config.has_segments:
        return InitialAllocatorState()
    at_end = sum(segment.size for segment in trace.segments)
    reserved = at_end - int(reserved_bytes_changes(trace.events).sum())
    if reserved < 0:
        raise FileFormatError(
            f"Cannot replay this trace: its events reserve {at_end - reserved:,} bytes more than they "
            f"release, but its segments hold only {at_end:,} bytes at the end. The file was truncated or "
            "edited. Record the run again."
        )
    if reserved == 0:
        return InitialAllocatorState()
    return _undo(trace.events, trace.segments, config, reserved)


def _undo(
    events: Events, segments: Sequence[Segment], config: AllocatorConfig, reserved: int
) -> InitialAllocatorState:
    _check_tiling(segments)
    rewind = _Rewind(segments, config)
    undo = {
        Action.FREE_COMPLETED: rewind.free_completed,
        Action.SEGMENT_ALLOC: rewind.shrink,
        Action.SEGMENT_MAP: rewind.shrink,
        Action.SEGMENT_FREE: rewind.segment_free,
        Action.SEGMENT_UNMAP: rewind.segment_unmap,
        Action.ALLOC: rewind.alloc,
        Action.FREE_REQUESTED: rewind.free_requested,
    }
    actions, addresses, sizes = events.action.tolist(), events.address.tolist(), events.size.tolist()
    position = 0
    try:
        for position in range(len(events) - 1, -1, -1):
            if actions[position] in undo:
                undo[actions[position]](addresses[position], sizes[position])
        return rewind.initial_state(reserved)
    except ImpossibleEventError as error:
        raise impossible_event_error(events, position, error) from None


def _check_tiling(segments: Iterable[Segment]) -> None:
    """Raise if segments overlap, or if the blocks of one do not fill it from end to end."""
    free_from = 0
    for segment in sorted(segments, key=lambda segment: segment.address):
        address = segment.address
        overlaps, is_tiled = address < free_from, True
        for block in segment.blocks:
            is_tiled = is_tiled and block.address == address and block.size > 0
            address += block.size
        free_from = segment.address + segment.size
        if overlaps or not is_tiled or address != free_from:
            fault = "overlaps another segment" if overlaps else "is not filled exactly by its blocks"
            raise FileFormatError(
                f"Cannot replay this trace: the segment of {segment.size:,} bytes at {segment.address:#x} "
                f"{fault}. Record the run again."
            )


class _Rewind:
    """The final state, undone event by event.

    One thing is not recorded: where a freed block ended if it was allocated before the history. It had at
    least its rounded size, and up to 1 MiB more if the remainder was too small to split off. Its rounded
    size is assumed until another block's start proves otherwise.
    """

    def __init__(self, segments: Iterable[Segment], config: AllocatorConfig) -> None:
        self._config = config
        self._live: dict[int, Extent] = {}
        self._pending: dict[int, Extent] = {}
        self._used: dict[int, int] = {}  # stop -> start of every block in use
        self._free: dict[int, Extent] = {}
        self._order: list[int] = []  # starts of free blocks
        self._spare: dict[int, int] = {}  # start of a block in use -> bytes it may have beyond its stop
        for segment in segments:
            key = EXPANDABLE if segment.expandable else segment.address
            for block in segment.blocks:
                extent = block.address + block.size, key
                if block.state == "inactive":
                    self._put(block.address, extent)
                    continue
                in_use = self._live if block.state == "active_allocated" else self._pending
                in_use[block.address] = extent
                self._used[extent[0]] = block.address

    def initial_state(self, reserved: int) -> InitialAllocatorState:
        """Return the state that is left once every event is undone."""
        layout = FreeRanges()
        for start, (stop, segment) in self._free.items():
            layout.put(start, stop, segment)
        uncertain = sum(spare for start, spare in self._spare.items() if start in self._live)
        return InitialAllocatorState(layout, self._live, self._pending, reserved, uncertain)

    def alloc(self, address: int, _size: int) -> None:
        """Undo an allocation: a block in use becomes the start of a free block."""
        extent = self._live.pop(address, None)
        if extent is None:
            raise ImpossibleEventError("the block is not in use after this event")
        self._used.pop(extent[0], None)
        self._spare.pop(address, None)
        self._return_remainder(address, extent[1])
        self._release(address, extent)

    def free_requested(self, address: int, _size: int) -> None:
        """Undo the request of a free: a tensor holds the block again."""
        extent = self._pending.pop(address, None)
        if extent is None:
            raise ImpossibleEventError(
                "this free never completes, but it is not pending at the end of the trace either"
            )
        self._live[address] = extent

    def free_completed(self, address: int, size: int) -> None:
        """Undo the completion of a free: part of a free block is in use again."""
        start, (stop, segment) = self._free_around(address, address + size)
        rounded = round_size(size, self._config)
        remainder = stop - address - rounded
        if remainder < 0:
            raise ImpossibleEventError("with its size rounded up, the block would overlap the next one")
        self._drop(start)
        if start < address:
            self._put(start, (address, segment))
        if should_split_block(rounded, remainder, self._config):
            self._put(address + rounded, (stop, segment))
            if not self._config.expandable_segments and rounded > SMALL_SIZE:
                self._spare[address] = min(remainder, SMALL_SIZE)
            stop = address + rounded
        self._pending[address] = stop, segment
        self._used[stop] = address

    def shrink(self, address: int, size: int) -> None:
        """Undo a segment's allocation or mapping."""
        start, (stop, segment) = self._free_around(address, address + size)
        self._drop(start)
        if start < address:
            self._put(start, (address, segment))
        if address + size < stop:
            self._put(address + size, (stop, segment))

    def segment_free(self, address: int, size: int) -> None:
        """Undo a cudaFree."""
        self._put(address, (address + size, address))

    def segment_unmap(self, address: int, size: int) -> None:
        """Undo an unmapping."""
        self._release(address, (address + size, EXPANDABLE))

    def _return_remainder(self, address: int, segment: int) -> None:
        """Give the seemingly free range just before a block to the block before that range.

        An allocation starts where a free block started, so nothing just before it in its segment was free:
        the range is the unsplit remainder of its neighbour.
        """
        index = bisect_left(self._order, address) - 1
        start = self._order[index] if index >= 0 else -1
        if self._free.get(start) != (address, segment):
            return
        owner = self._used.pop(start, None)
        if owner is None:
            raise ImpossibleEventError(
                "the memory directly below this address was free, and PyTorch would have placed the block "
                "there"
            )
        self._drop(start)
        in_use = self._live if owner in self._live else self._pending
        in_use[owner] = address, segment
        self._used[address] = owner
        self._spare.pop(owner, None)

    def _free_around(self, start: int, stop: int) -> tuple[int, Extent]:
        """Return the free block that holds ``[start, stop)``."""
        index = bisect_right(self._order, start) - 1
        around = self._order[index] if index >= 0 else -1
        extent = self._free.get(around, (-1, 0))
        if extent[0] < stop:
            raise ImpossibleEventError(
                "the rest of the trace shows that this memory is still in use after this event"
            )
        return around, extent

    def _release(self, start: int, extent: Extent) -> None:
        """Add a free block and merge it with the free neighbours of its segment."""
        stop, segment = extent
        index = bisect_left(self._order, start)
        if index < len(self._order) and self._order[index] == stop:
            end, key = self._free[stop]
            if key == segment:
                self._drop(stop)
                stop = end
        if index > 0:
            before = self._order[index - 1]
            if self._free[before] == (start, segment):
                self._drop(before)
                start = before
        self._put(start, (stop, segment))

    def _put(self, start: int, extent: Extent) -> None:
        index = bisect_left(self._order, start)
        if start in self._free:
            raise ImpossibleEventError("a free block already starts at this address")
        self._order.insert(index, start)
        self._free[start] = extent

    def _drop(self, start: int) -> None:
        del self._order[bisect_left(self._order, start)]
        del self._free[start]
