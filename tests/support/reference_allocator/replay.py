"""A replay with the reference allocator: what ``memfit.allocator.replay`` does with the compiled one."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.requests import AllocatorRequests, PoolId, RequestKind
from memfit.records import DriverCalls, FailedMalloc, ReplayResult
from support.reference_allocator.caching_allocator import CachingAllocator
from support.reference_allocator.device_memory import DeviceMemory, SimulatedOutOfMemoryError
from support.reference_allocator.memory_stats import memory_stats

if TYPE_CHECKING:
    from collections.abc import Callable

_MALLOC, _FREE, _FREE_LATER, _GONE_ON, _EMPTY_CACHE, _FAILED, _STEP = map(
    int,
    (
        RequestKind.MALLOC,
        RequestKind.FREE,
        RequestKind.FREE_LATER,
        RequestKind.GONE_ON,
        RequestKind.EMPTY_CACHE,
        RequestKind.FAILED,
        RequestKind.STEP,
    ),
)
_CAPTURE_BEGIN, _CAPTURE_END, _RELEASE_POOL, _EMPTY_POOL = map(
    int,
    (RequestKind.CAPTURE_BEGIN, RequestKind.CAPTURE_END, RequestKind.RELEASE_POOL, RequestKind.EMPTY_POOL),
)
_USE, _ALL_GONE_ON = int(RequestKind.USE), int(RequestKind.ALL_GONE_ON)
_OTHERS = 1 << 40
"""First number of the streams that use other streams' blocks: one for each such block."""


def replay_in_python(
    asked: AllocatorRequests,
    config: AllocatorConfig,
    *,
    total: int,
    taken: int = 0,
    version: tuple[int, int] = (2, 14),
    empty_cache_each_step: bool = False,
) -> ReplayResult:
    """Replay requests, as ``memfit.allocator.replay.replay_requests`` does."""
    memory = DeviceMemory(total, used=taken)
    allocator, failure = CachingAllocator(memory, config, version), None
    run = _RequestServer(allocator, empty_cache_each_step=empty_cache_each_step)
    try:
        run.serve_all(asked)
    except SimulatedOutOfMemoryError as error:
        failure = FailedMalloc(asked.event[run.position], error.size, error.free)
    statistics = memory_stats(allocator)
    return ReplayResult(
        failure=failure,
        peak_allocated=statistics["allocated_bytes.all.peak"],
        peak_reserved=statistics["reserved_bytes.all.peak"],
        most_taken=memory.most,
        calls=memory.calls,
        calls_per_step=run.steps[-1] - run.steps[-2] if len(run.steps) > 1 else None,
        statistics=statistics,
        segments=allocator.snapshot(),
    )


class _RequestServer:
    """Serves requests one by one: an allocator, and the blocks that the script holds."""

    def __init__(self, allocator: CachingAllocator, *, empty_cache_each_step: bool) -> None:
        self.allocator = allocator
        self.position = 0
        """Index of the current request."""
        self.steps: list[DriverCalls] = []
        """Driver calls up to the end of each training step."""
        self._empties = empty_cache_each_step
        self._ids: tuple[PoolId, ...] = ()
        self._pool = 0  # the pool to allocate from
        self._used: set[int] = set()  # private pools used so far

    def serve_all(self, asked: AllocatorRequests) -> None:
        """Serve every request."""
        allocator = self.allocator
        malloc: Callable[[int, int], Any] = allocator.malloc
        free: Callable[[Any], None] = allocator.free
        blocks: dict[int, Any] = {}
        self._ids = asked.pools
        rows = zip(asked.ask, asked.block, asked.size, asked.stream, asked.pool, strict=True)
        for self.position, (ask, number, size, stream, pool) in enumerate(rows):
            if ask == _MALLOC:
                if pool != self._pool:
                    self._allocate_to(pool)
                blocks[number] = malloc(size, stream)
            elif ask == _FREE:
                free(blocks.pop(number))
            elif ask == _FREE_LATER:
                block = blocks.pop(number)
                allocator.record_stream(block, _OTHERS + number)
                free(block)
            elif ask == _USE:
                allocator.record_stream(blocks[number], stream)
            elif ask == _GONE_ON:
                allocator.stream_is_done(_OTHERS + number)
            elif ask == _FAILED:
                self._allocate_to(pool)
                self._repeat_failed_malloc(size, stream)
            else:
                self._serve_rare(ask, pool)

    def _serve_rare(self, ask: int, pool: int) -> None:
        """Serve a request that concerns no block."""
        allocator = self.allocator
        if ask == _EMPTY_CACHE or (ask == _STEP and self._empties):
            allocator.empty_cache()
        if ask == _STEP:
            self.steps.append(replace(allocator.memory.calls))
        elif ask == _CAPTURE_BEGIN:
            allocator.captures += 1
        elif ask == _CAPTURE_END:
            allocator.captures -= 1
        elif ask == _RELEASE_POOL:
            self._allocate_to(0)
            if pool in self._used:
                self._used.remove(pool)
                allocator.release_pool(self._ids[pool])
        elif ask == _EMPTY_POOL:
            allocator.empty_cache(self._ids[pool])
        elif ask == _ALL_GONE_ON:
            allocator.all_streams_are_done()

    def _allocate_to(self, pool: int) -> None:
        """Allocate from a pool from now on; it counts as used once, until it is released."""
        allocator, ids = self.allocator, self._ids
        if self._pool:
            allocator.end_allocate_to_pool(ids[self._pool])
        if pool:
            allocator.begin_allocate_to_pool(ids[pool])
            if pool in self._used:
                allocator.release_pool(ids[pool])
            self._used.add(pool)
        self._pool = pool

    def _repeat_failed_malloc(self, size: int, stream: int) -> None:
        """Repeat a malloc that failed in the trace: the attempt released the cache.

        The script continued without the block; so does the replay, even if the malloc succeeds here.
        """
        try:
            block: Any = self.allocator.malloc(size, stream)
        except SimulatedOutOfMemoryError:
            return
        self.allocator.free(block)
