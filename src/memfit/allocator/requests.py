"""What a script asked of the allocator, read from the history of what the allocator did.

    history                                      requests
    segment_alloc, alloc 0x7000                  malloc
    free_requested 0x7000, free_completed        free
    free_requested 0x7000, ... free_completed    free later; the stream that still used it has gone on
    segment_free, not within a malloc            empty_cache
    segment_free of a private pool               that pool's graphs or MemPool are gone
    oom                                          a malloc that failed, or, if that ended the script, a malloc

Everything else is the allocator's own doing, and is done anew in a replay.
"""

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from operator import attrgetter, itemgetter

import numpy as np

from memfit.allocator.block_lifetimes import BlockTracker
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.initial_state import initial_state
from memfit.allocator.release_cause import MemoryRelease, memory_releases
from memfit.errors import FileFormatError, UsageError
from memfit.records import DEFAULT_POOL, Action, MarkKind, Trace


class RequestKind(IntEnum):
    """What is asked for."""

    MALLOC = 0
    FREE = 1
    FREE_LATER = 2
    """Freed by the script, and another stream still uses it."""
    GONE_ON = 3
    """That stream has gone on."""
    EMPTY_CACHE = 4
    FAILED = 5
    """A malloc that failed when the history was made, and that the script went on without."""
    STEP = 6
    """A training step has ended."""
    USE = 7
    """A block is used on another stream. A history does not tell: see ``FREE_LATER``."""
    ALL_GONE_ON = 8
    """Every stream has gone on."""
    CAPTURE_BEGIN = 9
    """A CUDA graph is captured: until it ends, a malloc that is short of memory fails."""
    CAPTURE_END = 10
    RELEASE_POOL = 11
    """A private pool is no longer used: from now on its memory is given back like the cache."""
    EMPTY_POOL = 12
    """And is given back now: it was a ``MemPool``'s."""


_column = partial(array, "q")  # where compiled code finds them as they are


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests in their order, as columns of equal length."""

    ask: "array[int]" = field(default_factory=_column)
    block: "array[int]" = field(default_factory=_column)
    """Which block: numbered in the order of their mallocs; -1 where none is meant."""
    size: "array[int]" = field(default_factory=_column)
    """Bytes as requested; rounded for ``FAILED``."""
    stream: "array[int]" = field(default_factory=_column)
    pool: "array[int]" = field(default_factory=_column)
    """Index into ``pools``, of ``MALLOC``, ``FAILED``, ``RELEASE_POOL`` and ``EMPTY_POOL``; 0 elsewhere."""
    event: "array[int]" = field(default_factory=_column)
    """The event of the history that tells of it."""
    pools: tuple[tuple[int, int], ...] = (DEFAULT_POOL,)
    """As PyTorch numbers them."""
    reserved_before: int = 0
    """Bytes that were reserved before the history begins: which segments is not known."""

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs were captured, as far as is told: pools (*n*, 0) are theirs."""
        return any(first for first, _ in self.pools) or RequestKind.CAPTURE_BEGIN in self.ask

    def add(
        self, ask: RequestKind, event: int, block: int = -1, size: int = 0, stream: int = 0, pool: int = 0
    ) -> None:
        """Add one."""
        self.ask.append(int(ask))
        self.block.append(block)
        self.size.append(size)
        self.stream.append(stream)
        self.pool.append(pool)
        self.event.append(event)

    def add_all(self, ask: RequestKind, event: int, blocks: list[int]) -> None:
        """Add one for each of some blocks."""
        for block in blocks:
            self.add(ask, event, block)


_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED, _OOM = map(
    int, (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM)
)
_MOST = 1 << 47
"""Bytes that a process can address."""
_ASKED = {
    MarkKind.EMPTY_CACHE: RequestKind.EMPTY_CACHE,
    MarkKind.TRAINING_STEP: RequestKind.STEP,
    MarkKind.CAPTURE_BEGIN: RequestKind.CAPTURE_BEGIN,
    MarkKind.CAPTURE_END: RequestKind.CAPTURE_END,
}


def read_requests(trace: Trace) -> Requests:
    """Read the requests from a trace.

    What was live before a history that begins late comes first, as mallocs of its blocks' sizes.

    Raises:
        FileFormatError: the history contradicts itself, or does not tell enough.
    """
    try:
        config = AllocatorConfig.read(trace.settings)
    except UsageError as error:
        raise FileFormatError(f"Cannot replay this trace: {error}") from None
    _check(trace, config)
    start = initial_state(trace, config)
    found = Requests(pools=_pools(trace), reserved_before=start.reserved)
    numbers: dict[int, int] = {}
    owners = _Owners(trace)
    for address, (stop, _) in sorted((start.live | start.pending).items()):
        numbers[address] = len(numbers)
        found.add(RequestKind.MALLOC, 0, numbers[address], stop - address, *owners(address))
        if address in start.pending:
            found.add(RequestKind.FREE_LATER, 0, numbers[address])
    BlockTracker(trace.events, config, start).to(len(trace.events))  # raises where an event cannot be
    back = tuple(memory_releases(trace, config, start.reserved))
    live = {address: numbers[address] for address in start.live}
    waiting = {address: numbers[address] for address in start.pending}
    _Reader(trace, config, found, live, waiting, short={part.event for part in back if part.for_malloc}).read(
        _between(trace, found.pools, back)
    )
    return found


def _check(trace: Trace, config: AllocatorConfig) -> None:
    if not config.records_requests:
        made = f"backend:{config.backend}" if config.caching else "PYTORCH_NO_CUDA_MEMORY_CACHING"
        raise FileFormatError(
            f"Cannot replay this trace: it was made with {made}, and its history is incomplete. "
            "Record it with PyTorch's own caching allocator."
        )
    if trace.events.pool is None and _has_private_pools(trace):
        raise FileFormatError(
            "Cannot replay this trace: it has private pools (of CUDA graphs or torch.cuda.MemPool), and the "
            "file does not record which allocations belong to them. Record it with PyTorch 2.12 or later."
        )
    events = trace.events
    least = np.isin(events.action, (_ALLOC, _OOM)).astype(int)  # for 0 bytes PyTorch makes no block
    absurd = np.flatnonzero((events.size < least) | (events.size > _MOST))
    if len(absurd):
        event = int(absurd[0])
        raise FileFormatError(
            f"Cannot replay this trace: event {event} of {len(events)}, "
            f"{Action(events.action[event]).name.lower()}, has {events.size[event]:,} bytes; "
            f"sizes range from 1 to {_MOST:,}. The file was truncated or edited; record it again."
        )


def _has_private_pools(trace: Trace) -> bool:
    told = (MarkKind.CAPTURE_BEGIN, MarkKind.MEM_POOL_GONE)
    return any(segment.pool != DEFAULT_POOL for segment in trace.segments) or any(
        mark.kind in told for mark in trace.marks
    )


class _Reader:
    """Turns events into requests.

    Args:
        trace: whose events.
        config: the settings that it was made with.
        found: where the requests go.
        live: blocks in use before the first event, by address.
        waiting: blocks that were freed before it, and not yet free.
        short: events from which on memory was given back, for want of it.
    """

    def __init__(
        self,
        trace: Trace,
        config: AllocatorConfig,
        found: Requests,
        live: dict[int, int],
        waiting: dict[int, int],
        short: AbstractSet[int],
    ) -> None:
        self._actions = trace.events.action.tolist()
        self._addresses = trace.events.address.tolist()
        self._sizes = trace.events.size.tolist()
        self._streams = trace.events.stream.tolist()
        self._pools = _pools_of(trace)
        self._shorts = short
        self._fatal = _fatal(trace)
        self._in_parts = config.max_split_size is not None or config.garbage_collection_threshold > 0
        self._found = found
        self._live = live
        self._waiting = waiting
        self._count = len(live) + len(waiting)
        self._gone: list[int] = []  # blocks whose free was completed since the last malloc
        self._gone_at: list[int] = []  # and the events of that
        self._short = False  # whether memory was given back since, for want of it

    def read(self, asked: list[tuple[int, RequestKind, int]]) -> None:
        """Read every event, and put what is asked for between them: before which, what, of which pool."""
        pending = deque(asked)
        end = len(self._actions)
        for event, (action, address) in enumerate(zip(self._actions, self._addresses, strict=True)):
            while pending and pending[0][0] <= event:
                _, ask, pool = pending.popleft()
                self._found.add(ask, event, pool=pool)
            if action in (_ALLOC, _OOM):
                self._malloc(event, failed=action == _OOM)
            elif action == _FREE_REQUESTED:
                self._free(event, address)
            elif action == _FREE_COMPLETED and address in self._waiting:
                self._gone.append(self._waiting.pop(address))
                self._gone_at.append(event)
            elif event in self._shorts:
                self._short = True
        self._found.add_all(RequestKind.GONE_ON, end, self._gone)
        for _, ask, pool in pending:
            self._found.add(ask, end, pool=pool)

    def _malloc(self, event: int, *, failed: bool) -> None:
        """Add a malloc; it begins by completing what it can, and waits for the rest if memory is short."""
        found, size, stream, pool = self._found, self._sizes[event], self._streams[event], self._pools[event]
        waited = self._short and not (self._in_parts and self._too_small(event))
        if not waited:
            found.add_all(RequestKind.GONE_ON, event, self._gone)
        if event == self._fatal:
            found.add(RequestKind.MALLOC, event, self._count, size, stream, pool)
        elif failed:
            found.add(RequestKind.FAILED, event, size=size, stream=stream, pool=pool)
        else:
            self._live[self._addresses[event]] = self._count
            found.add(RequestKind.MALLOC, event, self._count, size, stream, pool)
            self._count += 1
        if waited:
            found.add_all(RequestKind.GONE_ON, event, self._gone)
        self._gone, self._gone_at, self._short = [], [], False

    def _too_small(self, malloc: int) -> bool:
        """Whether no block whose free was completed would have served a malloc that was short of memory.

        A malloc that gives back part of the cache waits for no stream: what was completed was so before it.
        """
        where = self._streams[malloc], self._pools[malloc]
        return not any(
            self._sizes[event] >= self._sizes[malloc] and (self._streams[event], self._pools[event]) == where
            for event in self._gone_at
        )

    def _free(self, event: int, address: int) -> None:
        number = self._live.pop(address)
        following = slice(event + 1, event + 2)
        if (self._actions[following], self._addresses[following]) == ([_FREE_COMPLETED], [address]):
            self._found.add(RequestKind.FREE, event, number)
        else:
            self._waiting[address] = number
            self._found.add(RequestKind.FREE_LATER, event, number)


def _pools(trace: Trace) -> tuple[tuple[int, int], ...]:
    """Return the pools of a trace, and those that it tells nothing of but their end."""
    gone = [(0, mark.index) for mark in trace.marks if mark.kind is MarkKind.MEM_POOL_GONE]
    return tuple(dict.fromkeys([*(trace.pools or (DEFAULT_POOL,)), *gone]))


def _fatal(trace: Trace) -> int:
    """Return the event of the malloc whose failure ended the script; -1 if none did.

    A snapshot does not say how its script ended: by that, if nothing was allocated any more.
    """
    asked = np.flatnonzero(np.isin(trace.events.action, (_ALLOC, _OOM)))
    failed = asked[trace.events.action[asked] == _OOM]
    if not len(failed):
        return -1
    ended = trace.end.reason == "out of memory" or (not trace.command and failed[-1] == asked[-1])
    return int(failed[-1]) if ended else -1


def _between(
    trace: Trace, pools: tuple[tuple[int, int], ...], back: Sequence[MemoryRelease]
) -> list[tuple[int, RequestKind, int]]:
    """Return what is asked for between the events: before which, what, and of which pool."""
    told = [(part.event, RequestKind.RELEASE_POOL, pool) for part in back for pool in part.released]
    number = {pool: index for index, pool in enumerate(pools)}
    marks, captures = [], 0
    for mark in trace.marks:
        captures += (mark.kind is MarkKind.CAPTURE_BEGIN) - (mark.kind is MarkKind.CAPTURE_END)
        if captures < 0:  # it was begun before the history
            captures = 0
        elif mark.kind in _ASKED:
            marks.append((mark.position, _ASKED[mark.kind], 0))
        elif mark.kind is MarkKind.MEM_POOL_GONE:
            gone = number[0, mark.index]
            marks += [
                (mark.position, ask, gone) for ask in (RequestKind.RELEASE_POOL, RequestKind.EMPTY_POOL)
            ]
    unmarked = not any(ask is RequestKind.EMPTY_CACHE for _, ask, _ in marks)
    for part in back:
        if part.marked or part.for_malloc:
            continue
        if not part.shared:
            told += [(part.event, RequestKind.EMPTY_POOL, pool) for pool in part.released]
        elif unmarked:
            told.append((part.event, RequestKind.EMPTY_CACHE, 0))
    return sorted([*told, *marks], key=itemgetter(0))  # of one position in this order


def _pools_of(trace: Trace) -> list[int]:
    events = trace.events
    return [0] * len(events) if events.pool is None else events.pool.tolist()


class _Owners:
    """The stream and the pool of memory that was in use before the first event.

    Its free tells, or the segment that it is in at the end.
    """

    def __init__(self, trace: Trace) -> None:
        events = trace.events
        frees = np.flatnonzero(np.isin(events.action, (_FREE_REQUESTED, _FREE_COMPLETED)))
        addresses, firsts = np.unique(events.address[frees], return_index=True)
        self._freed = dict(zip(addresses.tolist(), frees[firsts].tolist(), strict=True))
        self._streams, self._pools = events.stream.tolist(), _pools_of(trace)
        self._segments = sorted(trace.segments, key=attrgetter("address"))
        self._number = {pool: number for number, pool in enumerate(trace.pools or (DEFAULT_POOL,))}

    def __call__(self, address: int) -> tuple[int, int]:
        event = self._freed.get(address)
        if event is not None:
            return self._streams[event], self._pools[event]
        segment = self._segments[bisect_right(self._segments, address, key=attrgetter("address")) - 1]
        return segment.stream, self._number[segment.pool]
