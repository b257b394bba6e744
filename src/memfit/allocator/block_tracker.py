"""Every block of the allocator, tracked from event to event.

The history records every address but only requested sizes. The free blocks give the rest: an allocation takes
the free block that starts at its address, and PyTorch's own rule determines how much of it is split off.

    event             allocated      reserved     the block
    ALLOC             + its size                  taken, split
    EARLIER                                       in use before the history: attributed to this event
    FREE_REQUESTED    - its size                  in use until other streams are done
    FREE_COMPLETED                                free, merged with its neighbours
    SEGMENT_ALLOC, SEGMENT_MAP       + size       free
    SEGMENT_FREE, SEGMENT_UNMAP      - size       gone
"""

from itertools import islice
from typing import NamedTuple

import numpy as np

from memfit.allocator.block_and_segment_sizes import round_size, should_split_block
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.free_ranges import ImpossibleEventError, impossible_event_error
from memfit.allocator.reconstruct_initial_state import InitialAllocatorState
from memfit.records import Action, Events

# As plain ints: comparing with an enum member costs more than the rest of a step.
_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED, _EARLIER = map(
    int, (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.EARLIER)
)

LIVE, PENDING, FREE = "active_allocated", "active_awaiting_free", "inactive"
"""The states of a block, as ``torch.cuda.memory_snapshot()`` spells them."""


class BlockSnapshot(NamedTuple):
    """A block at one moment: ``[start, stop)``."""

    start: int
    stop: int
    segment: int
    """Start of its segment; ``free_ranges.EXPANDABLE`` in mapped memory."""
    state: str
    born: int | None = None
    """Index of the event that allocated it; None if it is free, or older than the history."""


class BlockTracker:
    """Follows the blocks of a history as far as its caller asks.

    Args:
        events: ``n`` of them.
        config: the settings in force.
        start: the state before the first event; its free ranges are consumed.
    """

    def __init__(self, events: Events, config: AllocatorConfig, start: InitialAllocatorState) -> None:
        self.change = [0] * len(events)
        """Change of allocated bytes at each event so far."""
        self.freed_by: list[int] = np.where(
            np.isin(events.action, (_ALLOC, _EARLIER)), len(events), -1
        ).tolist()
        """As ``Timeline.freed_by``, for the events so far."""
        self.earlier: dict[int, int] = {}
        """Bytes of the block of each ``EARLIER`` event; ``start`` counts them already."""
        self.freed_old: dict[int, int] = {}
        """The freeing event of each block that is older than the history, by address."""
        self._events = events
        self._blocks = (_CachedBlocks if config.has_segments else _UncachedBlocks)(config, start)
        self._rows = zip(events.action.tolist(), events.address.tolist(), events.size.tolist(), strict=True)
        self._done = 0

    def advance_to(self, count: int) -> None:
        """Advance until the first ``count`` events have happened.

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
            raise impossible_event_error(self._events, position, error) from None
        self._done = max(self._done, count)

    def blocks(self) -> list[BlockSnapshot]:
        """Return every block at this moment, free ones included, by address."""
        return self._blocks.blocks()


class _CachedBlocks:
    """Every block of the native allocator, free or in use."""

    def __init__(self, config: AllocatorConfig, start: InitialAllocatorState) -> None:
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
            raise ImpossibleEventError("no free block starts at this address")
        stop, segment = free
        remainder = stop - address - rounded
        if remainder < 0:
            raise ImpossibleEventError(
                f"the free block at this address is only {stop - address:,} bytes long"
            )
        if should_split_block(rounded, remainder, self._config):
            self._layout.put(address + rounded, stop, segment)
            stop = address + rounded
        self._live[address] = position, stop, segment
        return stop - address

    def earlier(self, position: int, address: int) -> int:
        """Attribute a block from before the history to an event; return its size."""
        born, stop, segment = self._live.get(address, (position, 0, 0))
        if born is not None:
            raise ImpossibleEventError(
                "this event refers to a block allocated before the allocator history began, but no such "
                "block is in use at this address"
            )
        self._live[address] = position, stop, segment
        return stop - address

    def free_requested(self, address: int) -> tuple[int | None, int]:
        """Return the event that allocated the block, None if it is older than the history, and its size."""
        block = self._live.pop(address, None)
        if block is None:
            raise ImpossibleEventError("no allocated block starts at this address")
        self._pending[address] = block
        return block[0], block[1] - address

    def free_completed(self, address: int) -> None:
        """Free a block whose last stream is done with it."""
        block = self._pending.pop(address, None)
        if block is None:
            raise ImpossibleEventError("no earlier event requested to free a block at this address")
        self._layout.release(address, block[1], block[2])

    def segment(self, action: int, address: int, size: int) -> None:
        """Follow a segment that is made or released; ignore events that move no memory."""
        follow = self._on_segment.get(action)
        if follow is not None:
            follow(address, address + size)

    def blocks(self) -> list[BlockSnapshot]:
        """Return all blocks at this moment, by address."""
        free = (BlockSnapshot(start, stop, segment, FREE) for start, stop, segment in self._layout)
        live = (
            BlockSnapshot(start, stop, segment, LIVE, born)
            for start, (born, stop, segment) in self._live.items()
        )
        pending = (
            BlockSnapshot(start, stop, segment, PENDING, born)
            for start, (born, stop, segment) in self._pending.items()
        )
        return sorted([*free, *live, *pending])


class _UncachedBlocks(_CachedBlocks):
    """Allocations without a cache: each has its own device memory."""

    def alloc(self, position: int, address: int, size: int) -> int:
        """Return the size of the allocation."""
        if address in self._live:
            raise ImpossibleEventError("memory at this address is already in use")
        self._live[address] = position, address + size, address
        return size

    def free_requested(self, address: int) -> tuple[int | None, int]:
        """Return the event that made the allocation, and its size."""
        freed = super().free_requested(address)
        del self._pending[address]
        return freed

    def free_completed(self, address: int) -> None:
        """Do nothing: the memory was freed when its free was requested."""

    def segment(self, action: int, address: int, size: int) -> None:
        """Do nothing: there are no segments."""
