"""Replay of a trace's requests: under other settings, on another device, or with less free memory.

    trace -> requests -> CompiledAllocator -> ReplayResult

A script requests the same memory under any allocator settings: requests do not depend on addresses. So a
replay is exact under any settings, as far as the history records the requests. It ends where a malloc fails,
because what the script would do then is unknown.
"""

from copy import copy

from memfit.allocator import compiled_allocator
from memfit.allocator.block_and_segment_sizes import device_bytes_of_cuda_malloc
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.requests import AllocatorRequests, RequestKind
from memfit.errors import UsageError
from memfit.records import DriverCalls, FailedMalloc, ReplayResult


def replay_requests(
    asked: AllocatorRequests,
    config: AllocatorConfig,
    *,
    total: int,
    taken: int = 0,
    version: tuple[int, int] = (2, 14),
    empty_cache_each_step: bool = False,
) -> ReplayResult:
    """Replay requests under settings on a device.

    Args:
        asked: what ``allocator_requests_of_trace(trace)`` returned.
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
        return _replay_uncached(asked, total=total, taken=taken)
    with compiled_allocator.open_compiled_allocator(
        config,
        blocks=max(asked.block, default=-1) + 1,
        pools=asked.pools,
        total=total,
        taken=taken,
        version=version,
        empty_cache_each_step=empty_cache_each_step,
    ) as allocator:
        return allocator.replay(asked)


_MALLOC, _FAILED, _STEP = map(int, (RequestKind.MALLOC, RequestKind.FAILED, RequestKind.STEP))
_FREES = frozenset(map(int, (RequestKind.FREE, RequestKind.FREE_LATER)))  # cudaFree waits for every stream


def _replay_uncached(asked: AllocatorRequests, *, total: int, taken: int) -> ReplayResult:
    """Replay requests without a cache; arguments as those of ``replay_requests``."""
    calls = DriverCalls()
    free = least_free = total - taken
    allocated = peak_allocated = 0
    sizes: dict[int, int] = {}
    steps: list[DriverCalls] = []
    failure = None
    for ask, number, size, event in zip(asked.ask, asked.block, asked.size, asked.event, strict=True):
        if ask in (_MALLOC, _FAILED):
            calls.malloc += 1
            if device_bytes_of_cuda_malloc(size) <= free:
                sizes[number] = size
                allocated += size
                free -= device_bytes_of_cuda_malloc(size)
                peak_allocated, least_free = max(peak_allocated, allocated), min(least_free, free)
            elif ask == _MALLOC:
                failure = FailedMalloc(event, size, free)
                break
        # The script went on without the block of a malloc that failed, even if it succeeds here.
        if ask in _FREES or (ask == _FAILED and number in sizes):
            calls.free += 1
            freed = sizes.pop(number)
            allocated -= freed
            free += device_bytes_of_cuda_malloc(freed)
        elif ask == _STEP:
            steps.append(copy(calls))
    reserved = total - taken - least_free
    return ReplayResult(
        failure=failure,
        peak_allocated=peak_allocated,
        peak_reserved=reserved,
        most_taken=taken + reserved if reserved else 0,
        calls=calls,
        calls_per_step=steps[-1] - steps[-2] if len(steps) > 1 else None,
        # PyTorch itself counts nothing in this mode.
        statistics={"allocated_bytes.all.peak": peak_allocated, "reserved_bytes.all.peak": reserved},
        segments=(),
    )
