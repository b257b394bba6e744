"""Replay of a trace's requests: under other settings, on another device, or with less free memory.

    trace -> requests -> CachingAllocator -> Replay

A script requests the same memory under any allocator settings: requests do not depend on addresses. So a
replay is exact under any settings, as far as the history records the requests. It ends where a malloc fails,
because what the script would do then is unknown.
"""

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memfit.allocator import compiled_allocator
from memfit.allocator.caching_allocator import CachingAllocator
from memfit.allocator.compiled_allocator import CompiledAllocator
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.device_memory import DeviceMemory, SimulatedOutOfMemoryError
from memfit.allocator.memory_stats import memory_stats
from memfit.allocator.requests import RequestKind, Requests
from memfit.allocator.uncached_allocator import UncachedAllocator
from memfit.errors import UsageError
from memfit.records import DriverCalls, FailedMalloc, Replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from memfit.allocator.blocks import PoolId

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
Allocator = CachingAllocator | UncachedAllocator
_OTHERS = 1 << 40
"""First number of the streams that use other streams' blocks: one for each such block."""


def replay(
    asked: Requests,
    config: AllocatorConfig,
    *,
    total: int,
    taken: int = 0,
    version: tuple[int, int] = (2, 14),
    empty_cache_each_step: bool = False,
) -> Replay:
    """Replay requests under settings on a device.

    Args:
        asked: what ``read_requests(trace)`` returned.
        config: the settings to replay under.
        total: bytes of the device.
        taken: bytes of it that the context and other processes hold.
        version: of PyTorch, major and minor.
        empty_cache_each_step: call ``torch.cuda.empty_cache`` after each training step.

    Returns:
        Peaks, calls and segments; up to the malloc that failed, if one did.

    Raises:
        UsageError: PyTorch would not accept the settings; those from ``AllocatorConfig.of`` are valid.
    """
    if config.max_split_size is not None and config.max_split_size < config.large_segment_size:
        raise UsageError(
            "max_split_size must be at least large_segment_size. With a smaller value, the allocator would "
            "release parts of segments."
        )
    if config.caching:
        with compiled_allocator.opened(
            config,
            blocks=max(asked.block, default=-1) + 1,
            pools=asked.pools,
            total=total,
            taken=taken,
            version=version,
            empty_cache_each_step=empty_cache_each_step,
        ) as compiled:
            if compiled is not None:
                with suppress(OverflowError):  # Python's ints are unbounded
                    return _compiled(compiled, asked)
    memory = DeviceMemory(total, used=taken)
    allocator: Allocator = (
        CachingAllocator(memory, config, version) if config.caching else UncachedAllocator(memory)
    )
    return _interpreted(_RequestServer(allocator, empty_cache_each_step=empty_cache_each_step), asked)


def _compiled(allocator: CompiledAllocator, asked: Requests) -> Replay:
    fits = allocator.serve(asked)
    outcome, statistics = allocator.outcome(), allocator.memory_stats()
    return Replay(
        failure=None
        if fits
        else FailedMalloc(asked.event[outcome.position], outcome.requested, outcome.free),
        peak_allocated=statistics["allocated_bytes.all.peak"],
        peak_reserved=statistics["reserved_bytes.all.peak"],
        most_taken=outcome.most_taken,
        calls=outcome.calls,
        calls_per_step=outcome.calls_per_step,
        statistics=statistics,
        segments=allocator.snapshot(),
    )


def _interpreted(run: "_RequestServer", asked: Requests) -> Replay:
    allocator, failure = run.allocator, None
    try:
        run.serve_all(asked)
    except SimulatedOutOfMemoryError as error:
        failure = FailedMalloc(asked.event[run.position], error.size, error.free)
    statistics = (
        memory_stats(allocator) if isinstance(allocator, CachingAllocator) else allocator.memory_stats()
    )
    memory = allocator.memory
    return Replay(
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

    def __init__(self, allocator: Allocator, *, empty_cache_each_step: bool) -> None:
        self.allocator = allocator
        self.position = 0
        """Index of the current request."""
        self.steps: list[DriverCalls] = []
        """Driver calls up to the end of each training step."""
        self._empties = empty_cache_each_step
        self._ids: tuple[PoolId, ...] = ()
        self._pool = 0  # the pool to allocate from
        self._used: set[int] = set()  # private pools used so far

    def serve_all(self, asked: Requests) -> None:
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
