"""Replay of a trace's requests: under other settings, on another device, or with less free memory.

    trace -> requests -> CompiledAllocator or UncachedAllocator -> Replay

A script requests the same memory under any allocator settings: requests do not depend on addresses. So a
replay is exact under any settings, as far as the history records the requests. It ends where a malloc fails,
because what the script would do then is unknown.
"""

from memfit.allocator import compiled_allocator
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.requests import Requests
from memfit.allocator.uncached_allocator import replay_uncached
from memfit.errors import UsageError
from memfit.records import FailedMalloc, Replay


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
        UsageError: PyTorch would not accept the settings (those from ``AllocatorConfig.of`` are valid). Or
            the device is larger than 1 EiB.
        MemfitError: no C compiler was found, or it failed.
    """
    if config.max_split_size is not None and config.max_split_size < config.large_segment_size:
        raise UsageError(
            "max_split_size must be at least large_segment_size. With a smaller value, the allocator would "
            "release parts of segments."
        )
    if not config.caching:
        return replay_uncached(asked, total=total, taken=taken)
    with compiled_allocator.opened(
        config,
        blocks=max(asked.block, default=-1) + 1,
        pools=asked.pools,
        total=total,
        taken=taken,
        version=version,
        empty_cache_each_step=empty_cache_each_step,
    ) as allocator:
        fits = allocator.serve(asked)
        outcome, statistics = allocator.outcome(), allocator.memory_stats()
        segments = allocator.snapshot()
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
        segments=segments,
    )
