"""How PyTorch's native allocator sizes blocks and segments.

    requested  ->  rounded          to 512 B, or to a division of a power of two
    rounded    ->  pool             small up to 1 MiB, large beyond
    a free block of the pool:   |<---- rounded ---->|<-- remainder -->|
                                 split off if the remainder is worth a block; otherwise the
                                 block counts whole: 11 MiB alone in its 12 MiB segment takes 12 MiB

Every rule is that of PyTorch 2.14.1, its name and file beside it.
"""

from memfit.allocator.config import INTERVALS, AllocatorConfig
from memfit.units import MIB

# c10/core/AllocatorConfig.h
MIN_BLOCK = 512  # kMinBlockSize
SMALL_SIZE = MIB  # kSmallSize: the largest block of the small pool
SMALL_SEGMENT = 2 * MIB  # kSmallBuffer
MIN_LARGE_ALLOC = 10 * MIB  # kMinLargeAlloc: from here on a segment has the size of its request
ROUND_LARGE = 2 * MIB  # kRoundLarge

GRANULE = 2 * MIB
"""For sizes from 1 MiB up cudaMalloc takes whole multiples of this. Assumed: it is documented nowhere."""

_FIRST_INTERVAL = MIB.bit_length()
_DEFAULTS = AllocatorConfig()


def round_size(size: int, config: AllocatorConfig = _DEFAULTS) -> int:
    """Round a request up to the size PyTorch searches for.

    Args:
        size: bytes as requested, at least 1 (a request of 0 bytes makes no block).
        config: the settings in force.

    Returns:
        Bytes, a multiple of 512.

    Source: ``round_size`` and ``roundup_power2_next_division``, c10/cuda/CUDACachingAllocator.cpp;
    ``roundup_power2_divisions(size)``, c10/core/AllocatorConfig.cpp.

    >>> round_size(4), round_size(1025)
    (512, 1536)
    """
    if size < MIN_BLOCK:
        return MIN_BLOCK
    interval = min(max(size.bit_length() - _FIRST_INTERVAL, 0), INTERVALS - 1)
    divisions = config.roundup_power2_divisions[interval]
    step = MIN_BLOCK
    if divisions > 1:
        # PyTorch leaves sizes up to 512 * divisions alone: there a step would be 512 bytes or less.
        step = max(step, (1 << (size.bit_length() - 1)) // divisions)
    return -(-size // step) * step


def segment_bytes_for_request(size: int, config: AllocatorConfig = _DEFAULTS) -> int:
    """Return the bytes PyTorch asks cudaMalloc for when no cached block serves a request.

    Expandable segments map whole handles instead: 2 MiB each in the small pool, ``large_segment_size``
    each in the large one.

    Source: ``get_allocation_size``, c10/cuda/CUDACachingAllocator.cpp.

    >>> segment_bytes_for_request(4), segment_bytes_for_request(11 * MIB)
    (2097152, 12582912)
    """
    rounded = round_size(size, config)
    if rounded <= SMALL_SIZE:
        return SMALL_SEGMENT
    if rounded < MIN_LARGE_ALLOC:
        return config.large_segment_size
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE


def device_bytes_for_request(size: int, config: AllocatorConfig = _DEFAULTS) -> int:
    """Return the bytes of the device that PyTorch needs when no cached block serves a request.

    >>> (
    ...     device_bytes_for_request(16 * MIB),
    ...     device_bytes_for_request(16 * MIB, AllocatorConfig.of("expandable_segments:True")),
    ... )
    (16777216, 20971520)
    """
    if not config.has_segments:
        return size
    whole = segment_bytes_for_request(size, config)
    if not config.expandable_segments or whole == SMALL_SEGMENT:
        return whole
    return -(-whole // config.large_segment_size) * config.large_segment_size


def should_split_block(rounded: int, remainder: int, config: AllocatorConfig = _DEFAULTS) -> bool:
    """Return whether the remainder of a block becomes a free block of its own.

    Args:
        rounded: bytes after ``round_size``; their pool is the block's pool.
        remainder: bytes of the free block beyond them.
        config: the settings in force.

    Source: ``should_split_block``, c10/cuda/CUDACachingAllocator.cpp. Pools made with
    ``torch.cuda.MemPool(no_split=True)`` never split; a history does not record which pools they are.

    >>> should_split_block(11 * MIB, MIB), should_split_block(11 * MIB, MIB + 512)
    (False, True)
    """
    small = rounded <= SMALL_SIZE
    limit = None if small or config.expandable_segments else config.max_split_size
    return remainder >= least_split_remainder(config, small=small) and (limit is None or rounded < limit)


def least_split_remainder(config: AllocatorConfig, *, small: bool) -> int:
    """Return the smallest remainder, in bytes, that becomes a block of the small or the large pool."""
    return MIN_BLOCK if small or config.expandable_segments else SMALL_SIZE + 1


def device_bytes_of_cuda_malloc(size: int) -> int:
    """Return the bytes that a cudaMalloc of ``size`` bytes takes from the device, by ``GRANULE``."""
    granule = GRANULE if size >= MIB else MIN_BLOCK
    return -(-size // granule) * granule
