"""Why the allocator released memory: a history records that it did, but not why.

    released                                      cause
    while a malloc was short of memory            that malloc
    at a mark                                     that call of empty_cache, or the end of that MemPool
    from private pools alone                      their MemPools are gone
    otherwise                                     a call of empty_cache without a mark

The allocator releases memory of a private pool only once its graphs and ``MemPool`` are gone, except for a
malloc in the pool itself (an oversize block, with ``max_split_size_mb``). So a release shows that they are
gone, but not since when.
"""

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.reconstruct_initial_state import reserved_bytes_changes
from memfit.records import Action, MarkKind, Trace

_RELEASES = frozenset(map(int, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)))
_GROWS = frozenset(map(int, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)))
_RELEASING_MARKS = frozenset((MarkKind.EMPTY_CACHE, MarkKind.MEM_POOL_GONE))
_OOM, _FREE_COMPLETED = int(Action.OOM), int(Action.FREE_COMPLETED)


@dataclass(frozen=True, slots=True)
class MemoryRelease:
    """Memory that the allocator released in one go."""

    event: int
    """Index of the event just after its cause."""
    for_malloc: bool
    """Whether a malloc that was short of memory caused it."""
    marked: bool
    """Whether a mark records the cause."""
    shared: bool
    """Whether some of the memory was in the default pool."""
    released: tuple[int, ...]
    """Numbers of the private pools that are no longer used."""


def memory_releases(trace: Trace, config: AllocatorConfig, reserved_before: int) -> Iterator[MemoryRelease]:
    """Yield every release with its cause, in the order of events."""
    last_mark = {mark.position: mark.kind for mark in trace.marks}
    actions = trace.events.action.tolist()
    pools = [0] * len(actions) if trace.events.pool is None else trace.events.pool.tolist()
    was_short = _shortness(trace, config, reserved_before)
    for start, first, stop in _runs(actions, last_mark.keys()):
        by_mark = last_mark.get(start) in _RELEASING_MARKS
        for_malloc = not by_mark and was_short(first, stop)
        of = {pools[event] for event in range(first, stop) if actions[event] in _RELEASES}
        private = of - {0}
        if for_malloc:
            private -= {pools[stop]}  # in use, by that malloc
        yield MemoryRelease(start if by_mark else first, for_malloc, by_mark, 0 in of, tuple(sorted(private)))


def _runs(actions: list[int], marked: AbstractSet[int]) -> Iterator[tuple[int, int, int]]:
    """Return the runs of consecutive events that release memory.

    Returns:
        For each run the index of its first event, of the first that releases, and after its last. Frees that
        the allocator waited for are part of a run; a mark starts a new run, as marks are between two calls.
    """
    event, count = 0, len(actions)
    while event < count:
        if actions[event] not in _RELEASES:
            event += 1
            continue
        first = start = event
        while start not in marked and start > 0 and actions[start - 1] == _FREE_COMPLETED:
            start -= 1
        event += 1
        while event < count and event not in marked and actions[event] in _RELEASES | {_FREE_COMPLETED}:
            event += 1
        yield start, first, event


def _shortness(trace: Trace, config: AllocatorConfig, before: int) -> Callable[[int, int], bool]:
    """Return what tells whether a malloc that was short of memory caused a run of events."""
    actions, sizes = trace.events.action.tolist(), trace.events.size.tolist()
    # Before each event, and after the last.
    reserved = [before, *(before + reserved_bytes_changes(trace.events).cumsum()).tolist()]
    device = trace.device
    # An unknown device is assumed to hold exactly as much as was ever reserved.
    room = max(reserved)
    if trace.statistics.get("num_alloc_retries") == 0:
        room = sum(map(abs, sizes))  # no malloc was ever short
    elif device.total.bytes:
        room = device.total.bytes - device.outside.bytes - device.in_use
    collects = config.garbage_collection_threshold > 0 or config.max_split_size is not None

    def was_short(first: int, stop: int) -> bool:
        if stop == len(actions):
            return False
        if actions[stop] == _OOM:
            return True
        return actions[stop] in _GROWS and (collects or reserved[first] + sizes[stop] > room)

    return was_short
