"""From the allocator's history to the bytes allocated and reserved after each event.

The history gives every address but only requested sizes. Walking it once with the free blocks at hand
tells the rest: an allocation takes the free block that starts at its address, and PyTorch's own rule
says how much of that block it keeps.

    event             allocated      reserved     the block
    ALLOC             + its size                  taken, split
    FREE_REQUESTED    - its size                  in use until other streams are done with it
    FREE_COMPLETED                                free, merged with its neighbours
    SEGMENT_ALLOC, SEGMENT_MAP       + size       free
    SEGMENT_FREE, SEGMENT_UNMAP      - size       gone
"""

import numpy as np
import numpy.typing as npt

from memfit.allocator.beginning import Beginning, beginning, reserved_change
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.layout import ImpossibleError, impossible
from memfit.allocator.rounding import round_size, should_split
from memfit.errors import FileFormatError, UsageError
from memfit.records import Action, Events, MarkKind, Timeline, Trace

# As plain ints: comparing with an enum's member costs more than the rest of a step.
_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED = map(
    int, (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED)
)

Int64 = npt.NDArray[np.int64]


def timeline(trace: Trace) -> Timeline:
    """Return the bytes allocated and reserved after each event, as PyTorch counts them.

    Args:
        trace: events, settings and the segments at the end. If the history begins late (a snapshot
            of a process that was already running), what was there is worked out from the end: see
            ``beginning``.

    Returns:
        ``torch.cuda.memory_allocated()`` and ``memory_reserved()`` after each event, to the byte.
        Where PyTorch keeps no cache (``backend:cudaMallocAsync``, no caching), both are the sum of
        the sizes that were allocated and not yet freed.

    Raises:
        FileFormatError: the history contradicts itself; the message names the event.
    """
    try:
        config = AllocatorConfig.read(trace.settings)
    except UsageError as error:
        raise FileFormatError(f"Cannot replay this trace: {error}") from None
    start = beginning(trace, config)
    sizes, freed_by = _walk(trace.events, config, start)
    allocated = start.allocated + np.cumsum(sizes)
    reserved = start.reserved + np.cumsum(reserved_change(trace.events)) if config.has_segments else allocated
    born = trace.events.action == Action.ALLOC
    return Timeline(
        allocated=allocated,
        reserved=reserved,
        block_size=np.where(born, sizes, 0),
        freed_by=freed_by,
    )


def _walk(events: Events, config: AllocatorConfig, start: Beginning) -> tuple[Int64, Int64]:
    """Return the change of allocated bytes at each event, and which event freed each allocation."""
    change = [0] * len(events)
    freed_by = np.where(events.action == Action.ALLOC, len(events), -1).tolist()
    blocks = _Blocks(config, start) if config.has_segments else _Uncached()
    rows = zip(events.action.tolist(), events.address.tolist(), events.size.tolist(), strict=True)
    position = 0
    try:
        for position, (action, address, size) in enumerate(rows):
            if action == _ALLOC:
                change[position] = blocks.alloc(position, address, size)
            elif action == _FREE_REQUESTED:
                born, freed = blocks.free_requested(address)
                change[position] = -freed
                if born is not None:
                    freed_by[born] = position
            elif action == _FREE_COMPLETED:
                blocks.free_completed(address)
            else:
                blocks.segment(action, address, size)
    except ImpossibleError as error:
        raise impossible(events, position, error) from None
    return np.array(change, np.int64), np.array(freed_by, np.int64)


class _Blocks:
    """Every block of the native allocator, free or in use."""

    def __init__(self, config: AllocatorConfig, start: Beginning) -> None:
        self._config = config
        self._layout = start.layout
        self._live: dict[int, tuple[int | None, int, int]] = {
            address: (None, *extent) for address, extent in start.live.items()
        }  # address -> (the event that allocated it, stop, segment)
        self._pending = dict(start.pending)  # address -> (stop, segment)
        self._rounded: dict[int, int] = {}  # requested -> rounded: training asks for the same sizes again
        self._on_segment = {
            int(Action.SEGMENT_ALLOC): self._layout.add_segment,
            int(Action.SEGMENT_FREE): self._layout.remove_segment,
            int(Action.SEGMENT_MAP): self._layout.map,
            int(Action.SEGMENT_UNMAP): self._layout.unmap,
        }

    def alloc(self, position: int, address: int, size: int) -> int:
        """Take a block and return its size."""
        rounded = self._rounded.get(size)
        if rounded is None:
            rounded = self._rounded[size] = round_size(size, self._config)
        free = self._layout.take(address)
        if free is None:
            raise ImpossibleError("no free block starts there")
        stop, segment = free
        remainder = stop - address - rounded
        if remainder < 0:
            raise ImpossibleError(f"the free block there has only {stop - address:,} bytes")
        if should_split(rounded, remainder, self._config):
            self._layout.put(address + rounded, stop, segment)
            stop = address + rounded
        self._live[address] = position, stop, segment
        return stop - address

    def free_requested(self, address: int) -> tuple[int | None, int]:
        """Return which event allocated the block, None if it was there before all, and its size."""
        block = self._live.pop(address, None)
        if block is None:
            raise ImpossibleError("no block in use starts there")
        born, stop, segment = block
        self._pending[address] = stop, segment
        return born, stop - address

    def free_completed(self, address: int) -> None:
        """Make a block free whose last user is done with it."""
        block = self._pending.pop(address, None)
        if block is None:
            raise ImpossibleError("no free of a block there was requested before")
        self._layout.release(address, *block)

    def segment(self, action: int, address: int, size: int) -> None:
        """Follow a segment that comes or goes; other events move no memory."""
        follow = self._on_segment.get(action)
        if follow is not None:
            follow(address, address + size)


class _Uncached:
    """Allocations without a cache: each is a piece of device memory of its own."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, int]] = {}  # address -> (the event that allocated it, bytes)

    def alloc(self, position: int, address: int, size: int) -> int:
        """Return the piece's size."""
        if address in self._live:
            raise ImpossibleError("there is memory in use at that address already")
        self._live[address] = position, size
        return size

    def free_requested(self, address: int) -> tuple[int, int]:
        """Return which event allocated the piece, and its size."""
        piece = self._live.pop(address, None)
        if piece is None:
            raise ImpossibleError("no memory in use starts there")
        return piece

    def free_completed(self, address: int) -> None:
        """Do nothing: the piece went when its free was requested."""

    def segment(self, action: int, address: int, size: int) -> None:
        """Do nothing: there are no segments."""


def disagreement(trace: Trace, derived: Timeline) -> str:
    """Compare a timeline with PyTorch's own statistics, the referee.

    Args:
        trace: its ``statistics`` are ``torch.cuda.memory_stats()`` after the last event; what they do
            not hold is not compared. Peaks are those since the last ``RESET_PEAK`` mark.
        derived: what ``timeline(trace)`` returned.

    Returns:
        One sentence that names both figures, or the empty string if all agree.
    """
    reset = max((mark.position for mark in trace.marks if mark.kind is MarkKind.RESET_PEAK), default=0)
    columns = {"allocated": derived.allocated, "reserved": derived.reserved}
    if not AllocatorConfig.read(trace.settings).has_segments:
        del columns["reserved"]  # CUDA's own pool takes memory in pieces that no history tells of
    for name, column in columns.items():
        # A reset sets the peak to what is in use then: the level after the event before the mark.
        level = np.concatenate((np.zeros(1, np.int64), column))[reset:]
        for what, figure in (("current", int(level[-1])), ("peak", int(level.max()))):
            counted = trace.statistics.get(f"{name}_bytes.all.{what}", figure)
            if counted != figure:
                return f"PyTorch counted {counted:,} bytes {name} ({what}); its history gives {figure:,}."
    return ""
