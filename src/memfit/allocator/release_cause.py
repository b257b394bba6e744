"""Why memory was given back: a history says that it was, and not on whose behalf.

    given back                                         why
    ... while a malloc was short of memory             for that malloc
    ... where it is marked that somebody asked         for that call of empty_cache, or that MemPool's end
    ... of private pools alone                         their MemPools are gone
    ... otherwise                                      a call of empty_cache that nobody marked

Of a private pool nothing is given back until its graphs and ``MemPool`` are gone, but for a malloc of its own
(an oversize block, with ``max_split_size_mb``). So what was given back tells that they are gone; since when,
nothing tells.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.initial_state import reserved_change
from memfit.records import Action, MarkKind, Trace

_GIVEN_BACK = frozenset(map(int, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)))
_GOT = frozenset(map(int, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)))
_ASK_FOR_IT = frozenset((MarkKind.EMPTY_CACHE, MarkKind.MEM_POOL_GONE))
_OOM, _FREE_COMPLETED = int(Action.OOM), int(Action.FREE_COMPLETED)


@dataclass(frozen=True, slots=True)
class MemoryRelease:
    """Memory that was given back at once."""

    event: int
    """Just before which it was asked for."""
    for_malloc: bool
    """By a malloc that was short of memory."""
    marked: bool
    """By whom a mark tells."""
    shared: bool
    """Whether some of it was the default pool's."""
    released: tuple[int, ...]
    """Private pools, by number, that nobody uses any more."""


def memory_releases(trace: Trace, config: AllocatorConfig, reserved_before: int) -> Iterator[MemoryRelease]:
    """Tell why memory was given back, in the order of events.

    Args:
        trace: a history.
        config: the settings that it was made with.
        reserved_before: bytes reserved before the first event.
    """
    last_mark = {mark.position: mark.kind for mark in trace.marks}
    actions = trace.events.action.tolist()
    pools = [0] * len(actions) if trace.events.pool is None else trace.events.pool.tolist()
    was_short = _Shortness(trace, config, reserved_before)
    for start, first, stop in _runs(actions, last_mark.keys()):
        by_mark = last_mark.get(start) in _ASK_FOR_IT
        for_malloc = not by_mark and was_short(first, stop)
        of = {pools[event] for event in range(first, stop) if actions[event] in _GIVEN_BACK}
        private = of - {0}
        if for_malloc:
            private -= {pools[stop]}  # in use, by that malloc
        yield MemoryRelease(start if by_mark else first, for_malloc, by_mark, 0 in of, tuple(sorted(private)))


def _runs(actions: list[int], marked: AbstractSet[int]) -> Iterator[tuple[int, int, int]]:
    """Return where memory was given back, event upon event.

    Returns:
        Of each run the first event, the first that gives back, and the one after the last. Frees that were
        waited for are part of it; a mark begins another, for marks lie between two calls of the allocator.
    """
    event, count = 0, len(actions)
    while event < count:
        if actions[event] not in _GIVEN_BACK:
            event += 1
            continue
        first = start = event
        while start not in marked and start > 0 and actions[start - 1] == _FREE_COMPLETED:
            start -= 1
        event += 1
        while event < count and event not in marked and actions[event] in _GIVEN_BACK | {_FREE_COMPLETED}:
            event += 1
        yield start, first, event


class _Shortness:
    """Whether memory was given back since a malloc was short of it."""

    def __init__(self, trace: Trace, config: AllocatorConfig, reserved_before: int) -> None:
        self._actions, self._sizes = trace.events.action.tolist(), trace.events.size.tolist()
        # Before each event, and after the last.
        after = (reserved_before + reserved_change(trace.events).cumsum()).tolist()
        self._reserved = [reserved_before, *after]
        device = trace.device
        # Of a device that is not known, as much is free as was ever reserved.
        self._room = max(self._reserved)
        if trace.statistics.get("num_alloc_retries") == 0:
            self._room = sum(map(abs, self._sizes))  # no malloc was ever short
        elif device.total.bytes:
            self._room = device.total.bytes - device.context.bytes - device.in_use
        self._collects = config.garbage_collection_threshold > 0 or config.max_split_size is not None

    def __call__(self, first: int, stop: int) -> bool:
        if stop == len(self._actions):
            return False
        if self._actions[stop] == _OOM:
            return True
        return self._actions[stop] in _GOT and (
            self._collects or self._reserved[first] + self._sizes[stop] > self._room
        )
