"""Every block of the allocator, event after event.

The history gives every address but only requested sizes. Walking it once with the free blocks at hand
tells the rest: an allocation takes the free block that starts at its address, and PyTorch's own rule
says how much of that block it keeps.

    event             allocated      reserved     the block
    ALLOC             + its size                  taken, split
    EARLIER                                       in use before the history: this event made it
    FREE_REQUESTED    - its size                  in use until other streams are done with it
    FREE_COMPLETED                                free, merged with its neighbours
    SEGMENT_ALLOC, SEGMENT_MAP       + size       free
    SEGMENT_FREE, SEGMENT_UNMAP      - size       gone
"""

from itertools import islice
from typing import NamedTuple

import numpy as np

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.free_ranges import ImpossibleEventError, impossible_event
from memfit.allocator.initial_state import InitialState
from memfit.allocator.rounding import round_size, should_split
from memfit.records import Action, Events

# As plain ints: comparing with an enum's member costs more than the rest of a step.
_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED, _EARLIER = map(
    int, (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.EARLIER)
)

LIVE, PENDING, FREE = "active_allocated", "active_awaiting_free", "inactive"
"""The states of a block, as ``torch.cuda.memory_snapshot()`` spells them."""


class TrackedBlock(NamedTuple):
    """A block at some moment: ``[start, stop)``."""

    start: int
    stop: int
    segment: int
    """Start of its segment; ``layout.EXPANDABLE`` in all that is mapped."""
    state: str
    born: int | None = None
    """The event that allocated it; None if it is free, or older than the history."""


class BlockTracker:
    """A history, followed as far as is asked for.

    Args:
        events: ``n`` of them.
        config: the settings in force.
        start: what was there before the first; its layout is used up.
    """

    def __init__(self, events: Events, config: AllocatorConfig, start: InitialState) -> None:
        self.change = [0] * len(events)
        """Of allocated bytes, at each event that was met so far."""
        self.freed_by: list[int] = np.where(
            np.isin(events.action, (_ALLOC, _EARLIER)), len(events), -1
        ).tolist()
        """As ``Timeline.freed_by``, as far as the walk got."""
        self.earlier: dict[int, int] = {}
        """Bytes of the block of each ``EARLIER`` event, which ``start`` has counted already."""
        self.freed_old: dict[int, int] = {}
        """The event that freed it, for each block that is older than the history, by address."""
        self._events = events
        self._blocks = _CachedBlocks(config, start) if config.has_segments else _UncachedBlocks()
        self._rows = zip(events.action.tolist(), events.address.tolist(), events.size.tolist(), strict=True)
        self._done = 0

    def to(self, count: int) -> None:
        """Go on until the first ``count`` events have happened.

        Raises:
            FileFormatError: the history contradicts itself; the message names the event.
        """
        change, freed_by, blocks = self.change, self.freed_by, self._blocks
        position = self._done
        try:
            for position, (action, address, size) in enumerate(
                islice(self._rows, max(0, count - self._done)), self._done
            ):
                if action == _ALLOC:
                    change[position] = blocks.alloc(position, address, size)
                elif action == _FREE_REQUESTED:
                    born, freed = blocks.free_requested(address)
                    change[position] = -freed
                    if born is not None:
                        freed_by[born] = position
                    else:
                        self.freed_old[address] = position
                elif action == _FREE_COMPLETED:
                    blocks.free_completed(address)
                elif action == _EARLIER:
                    change[position] = self.earlier[position] = blocks.earlier(position, address)
                else:
                    blocks.segment(action, address, size)
        except ImpossibleEventError as error:
            raise impossible_event(self._events, position, error) from None
        self._done = max(self._done, count)

    def pieces(self) -> list[TrackedBlock]:
        """Return every block there is now, free ones too, by address."""
        return self._blocks.pieces()


class _CachedBlocks:
    """Every block of the native allocator, free or in use."""

    def __init__(self, config: AllocatorConfig, start: InitialState) -> None:
        self._config = config
        self._layout = start.layout
        self._live: dict[int, tuple[int | None, int, int]] = {
            address: (None, *extent) for address, extent in start.live.items()
        }  # address -> (the event that allocated it, stop, segment)
        self._pending: dict[int, tuple[int | None, int, int]] = {
            address: (None, *extent) for address, extent in start.pending.items()
        }
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
            raise ImpossibleEventError("no free block starts there")
        stop, segment = free
        remainder = stop - address - rounded
        if remainder < 0:
            raise ImpossibleEventError(f"the free block there has only {stop - address:,} bytes")
        if should_split(rounded, remainder, self._config):
            self._layout.put(address + rounded, stop, segment)
            stop = address + rounded
        self._live[address] = position, stop, segment
        return stop - address

    def earlier(self, position: int, address: int) -> int:
        """Have an event stand for the allocation of a block that was there before all; return its size."""
        born, stop, segment = self._live.get(address, (position, 0, 0))
        if born is not None:
            raise ImpossibleEventError("no block in use there is older than the history")
        self._live[address] = position, stop, segment
        return stop - address

    def free_requested(self, address: int) -> tuple[int | None, int]:
        """Return which event allocated the block, None if it was there before all, and its size."""
        block = self._live.pop(address, None)
        if block is None:
            raise ImpossibleEventError("no block in use starts there")
        self._pending[address] = block
        return block[0], block[1] - address

    def free_completed(self, address: int) -> None:
        """Make a block free whose last user is done with it."""
        block = self._pending.pop(address, None)
        if block is None:
            raise ImpossibleEventError("no free of a block there was requested before")
        self._layout.release(address, block[1], block[2])

    def segment(self, action: int, address: int, size: int) -> None:
        """Follow a segment that comes or goes; other events move no memory."""
        follow = self._on_segment.get(action)
        if follow is not None:
            follow(address, address + size)

    def pieces(self) -> list[TrackedBlock]:
        """Return all blocks there are now, by address."""
        free = (TrackedBlock(start, stop, segment, FREE) for start, stop, segment in self._layout)
        live = (
            TrackedBlock(start, stop, segment, LIVE, born)
            for start, (born, stop, segment) in self._live.items()
        )
        pending = (
            TrackedBlock(start, stop, segment, PENDING, born)
            for start, (born, stop, segment) in self._pending.items()
        )
        return sorted([*free, *live, *pending])


class _UncachedBlocks:
    """Allocations without a cache: each is a piece of device memory of its own."""

    def __init__(self) -> None:
        self._live: dict[int, tuple[int, int]] = {}  # address -> (the event that allocated it, bytes)

    def alloc(self, position: int, address: int, size: int) -> int:
        """Return the piece's size."""
        if address in self._live:
            raise ImpossibleEventError("there is memory in use at that address already")
        self._live[address] = position, size
        return size

    def earlier(self, _position: int, _address: int) -> int:
        """Refuse: without segments nothing tells what was there before."""
        raise ImpossibleEventError("no block in use there is older than the history")

    def free_requested(self, address: int) -> tuple[int, int]:
        """Return which event allocated the piece, and its size."""
        piece = self._live.pop(address, None)
        if piece is None:
            raise ImpossibleEventError("no memory in use starts there")
        return piece

    def free_completed(self, address: int) -> None:
        """Do nothing: the piece went when its free was requested."""

    def segment(self, action: int, address: int, size: int) -> None:
        """Do nothing: there are no segments."""

    def pieces(self) -> list[TrackedBlock]:
        """Return what is in use, by address: nothing else is held."""
        return sorted(
            TrackedBlock(start, start + size, start, LIVE, born) for start, (born, size) in self._live.items()
        )
