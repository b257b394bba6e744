"""The requests of a script, reconstructed from the history of its allocator.

    history                                      requests
    segment_alloc, alloc 0x7000                  malloc
    free_requested 0x7000, free_completed        free
    free_requested 0x7000, ... free_completed    free later; then the stream that still used it is done
    segment_free, not within a malloc            empty_cache
    segment_free of a private pool               the pool's graphs or MemPool are gone
    oom                                          a failed malloc; a plain malloc if it ended the script

Everything else is the allocator's own doing, which a replay recomputes.
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

from memfit.allocator.block_tracker import BlockTracker
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.reconstruct_initial_state import reconstruct_initial_state
from memfit.allocator.release_cause import MemoryRelease, memory_releases
from memfit.errors import FileFormatError, UsageError
from memfit.records import DEFAULT_POOL, Action, MarkKind, Trace

PoolId = tuple[int, int]
"""PyTorch's id of a private pool, or ``DEFAULT_POOL``."""


class RequestKind(IntEnum):
    """What a request asks of the allocator."""

    MALLOC = 0
    FREE = 1
    FREE_LATER = 2
    """The script frees a block that another stream still uses."""
    GONE_ON = 3
    """That stream is done with the block."""
    EMPTY_CACHE = 4
    FAILED = 5
    """A malloc that failed when the history was made; the script continued without the block."""
    STEP = 6
    """A training step has ended."""
    USE = 7
    """Another stream uses a block. A history does not record this: see ``FREE_LATER``."""
    ALL_GONE_ON = 8
    """Every stream is done."""
    CAPTURE_BEGIN = 9
    """A CUDA graph capture begins: until it ends, a malloc that is short of memory fails."""
    CAPTURE_END = 10
    RELEASE_POOL = 11
    """A private pool is no longer used: from now on its memory is released like the cache."""
    EMPTY_POOL = 12
    """The memory of an unused private pool is released now: it was a ``MemPool``'s."""


_column = partial(array, "q")  # C reads the arrays in place


@dataclass(frozen=True, slots=True)
class AllocatorRequests:
    """Requests in order, as columns of equal length."""

    ask: "array[int]" = field(default_factory=_column)
    block: "array[int]" = field(default_factory=_column)
    """Number of the block, in the order of the mallocs; -1 in requests without a block."""
    size: "array[int]" = field(default_factory=_column)
    """Bytes as requested; rounded for ``FAILED``."""
    stream: "array[int]" = field(default_factory=_column)
    pool: "array[int]" = field(default_factory=_column)
    """Index into ``pools``, of ``MALLOC``, ``FAILED``, ``RELEASE_POOL`` and ``EMPTY_POOL``; 0 elsewhere."""
    event: "array[int]" = field(default_factory=_column)
    """Index of the event that shows the request."""
    pools: tuple[PoolId, ...] = (DEFAULT_POOL,)
    """As PyTorch numbers them."""
    reserved_before: int = 0
    """Bytes reserved before the history begins; their segments are unknown."""

    @property
    def captures(self) -> bool:
        """Whether CUDA graphs were captured, as far as the history shows: pools (*n*, 0) are theirs."""
        return any(first for first, _ in self.pools) or RequestKind.CAPTURE_BEGIN in self.ask

    def add(
        self, ask: RequestKind, event: int, block: int = -1, size: int = 0, stream: int = 0, pool: int = 0
    ) -> None:
        """Append a request."""
        self.ask.append(int(ask))
        self.block.append(block)
        self.size.append(size)
        self.stream.append(stream)
        self.pool.append(pool)
        self.event.append(event)

    def add_all(self, ask: RequestKind, event: int, blocks: list[int]) -> None:
        """Append one request for each block."""
        for block in blocks:
            self.add(ask, event, block)


_ALLOC, _FREE_REQUESTED, _FREE_COMPLETED, _OOM = map(
    int, (Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED, Action.OOM)
)
_MOST = 1 << 47
"""Bytes that a process can address."""
_KIND_OF_MARK = {
    MarkKind.EMPTY_CACHE: RequestKind.EMPTY_CACHE,
    MarkKind.TRAINING_STEP: RequestKind.STEP,
    MarkKind.CAPTURE_BEGIN: RequestKind.CAPTURE_BEGIN,
    MarkKind.CAPTURE_END: RequestKind.CAPTURE_END,
}


def allocator_requests_of_trace(trace: Trace) -> AllocatorRequests:
    """Read the requests of a trace.

    Blocks that were live before a late history come first, as mallocs of their sizes.
    """
    try:
        config = AllocatorConfig.read(trace.settings)
    except UsageError as error:
        raise FileFormatError(f"Cannot replay this trace: {error}") from None
    _check(trace, config)
    start = reconstruct_initial_state(trace, config)
    found = AllocatorRequests(pools=_pools(trace), reserved_before=start.reserved)
    numbers: dict[int, int] = {}
    owners = _Owners(trace)
    for address, (stop, _) in sorted((start.live | start.pending).items()):
        numbers[address] = len(numbers)
        found.add(RequestKind.MALLOC, 0, numbers[address], stop - address, *owners(address))
        if address in start.pending:
            found.add(RequestKind.FREE_LATER, 0, numbers[address])
    BlockTracker(trace.events, config, start).advance_to(len(trace.events))  # raises where an event cannot be
    back = tuple(memory_releases(trace, config, start.reserved))
    live = {address: numbers[address] for address in start.live}
    waiting = {address: numbers[address] for address in start.pending}
    _Reader(trace, config, found, live, waiting, short={part.event for part in back if part.for_malloc}).read(
        _between(trace, found.pools, back)
    )
    return found


def _check(trace: Trace, config: AllocatorConfig) -> None:
    if not config.records_requests:
        used = f"backend:{config.backend}" if config.caching else "PYTORCH_NO_CUDA_MEMORY_CACHING"
        raise FileFormatError(
            f"Cannot replay this trace: the run used {used}, so its allocator history is incomplete. "
            "Record the run with PyTorch's own caching allocator."
        )
    if trace.events.pool is None and _has_private_pools(trace):
        raise FileFormatError(
            "Cannot replay this trace: the run used private memory pools (of CUDA graphs or "
            "torch.cuda.MemPool), and the file does not record which allocations belong to each pool. "
            "Record the run with PyTorch 2.12 or later."
        )
    events = trace.events
    least = np.isin(events.action, (_ALLOC, _OOM)).astype(int)  # for 0 bytes PyTorch makes no block
    absurd = np.flatnonzero((events.size < least) | (events.size > _MOST))
    if len(absurd):
        event = int(absurd[0])
        raise FileFormatError(
            f"Cannot replay this trace. Event {event:,} of {len(events):,} (kind "
            f"{Action(events.action[event]).name.lower()}) has a size of {events.size[event]:,} bytes. Its "
            f"size must be between {least[event]} and {_MOST:,}. The file was truncated or edited. Record "
            "the run again."
        )


def _has_private_pools(trace: Trace) -> bool:
    kinds = (MarkKind.CAPTURE_BEGIN, MarkKind.MEM_POOL_GONE)
    return any(segment.pool != DEFAULT_POOL for segment in trace.segments) or any(
        mark.kind in kinds for mark in trace.marks
    )


class _Reader:
    """Converts events to requests.

    Args:
        trace: the history.
        config: the settings it was made with.
        found: receives the requests.
        live: blocks in use before the first event, by address.
        waiting: blocks whose free was requested before it and is not completed.
        short: events at which a malloc short of memory began to release it.
    """

    def __init__(
        self,
        trace: Trace,
        config: AllocatorConfig,
        found: AllocatorRequests,
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
        self._gone: list[int] = []  # blocks whose free completed since the last malloc
        self._gone_at: list[int] = []  # the events that completed those frees
        self._short = (
            False  # whether the allocator released memory since the last malloc because it ran short
        )

    def read(self, asked: list[tuple[int, RequestKind, int]]) -> None:
        """Read every event; ``asked`` has the requests between events: (event, kind, pool)."""
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
        """Add a malloc; it first completes pending frees, and waits for the others if memory is short."""
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
        """Return whether no completed free could have served a malloc that was short of memory.

        A malloc that releases part of the cache waits for no stream, so those frees completed before it.
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
    """Return the pools of a trace, and those of which it records only the end."""
    gone = [(0, mark.index) for mark in trace.marks if mark.kind is MarkKind.MEM_POOL_GONE]
    return tuple(dict.fromkeys([*(trace.pools or (DEFAULT_POOL,)), *gone]))


def _fatal(trace: Trace) -> int | None:
    """Return the event of the malloc whose failure ended the script; None if none did.

    A snapshot does not record how its script ended: a failed malloc ended it if no allocation follows.
    """
    asked = np.flatnonzero(np.isin(trace.events.action, (_ALLOC, _OOM)))
    failed = asked[trace.events.action[asked] == _OOM]
    if not len(failed):
        return None
    ended = trace.end.reason == "out of memory" or (not trace.command and failed[-1] == asked[-1])
    return int(failed[-1]) if ended else None


def _between(
    trace: Trace, pools: tuple[tuple[int, int], ...], back: Sequence[MemoryRelease]
) -> list[tuple[int, RequestKind, int]]:
    """Return the requests between events: (event that follows, kind, pool)."""
    inferred = [(part.event, RequestKind.RELEASE_POOL, pool) for part in back for pool in part.released]
    number = {pool: index for index, pool in enumerate(pools)}
    marks, captures = [], 0
    for mark in trace.marks:
        captures += (mark.kind is MarkKind.CAPTURE_BEGIN) - (mark.kind is MarkKind.CAPTURE_END)
        if captures < 0:  # begun before the history
            captures = 0
        elif mark.kind in _KIND_OF_MARK:
            marks.append((mark.position, _KIND_OF_MARK[mark.kind], 0))
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
            inferred += [(part.event, RequestKind.EMPTY_POOL, pool) for pool in part.released]
        elif unmarked:
            inferred.append((part.event, RequestKind.EMPTY_CACHE, 0))
    return sorted([*inferred, *marks], key=itemgetter(0))  # stable: at one position in this order


def _pools_of(trace: Trace) -> list[int]:
    events = trace.events
    return [0] * len(events) if events.pool is None else events.pool.tolist()


class _Owners:
    """The stream and the pool of memory that was in use before the first event.

    They come from the event that freed it, or from its segment at the end.
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
