"""Which cached blocks to release to the device when not all of them have to go.

    cudaMalloc failed, with max_split_size_mb                    one oversize block, or several
    above the limit, with garbage_collection_threshold           the oldest whole segments

``caching_allocator.py`` releases the blocks that are chosen here.
"""

from bisect import bisect_left

from support.reference_allocator.blocks import SIZE_SHIFT, Block, BlockPool


def oversize_blocks(pool: BlockPool, stream: int, wanted: int, limit: int) -> list[Block]:
    """Return the smallest block of at least ``wanted`` bytes, or else blocks from the largest down.

    Args:
        pool: the pool to search.
        stream: the stream of the blocks.
        wanted: bytes the blocks should have together; they may have less.
        limit: the least bytes of each of several blocks: ``max_split_size``.

    Source: ``release_available_cached_blocks``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
    """
    keys = pool.of(stream)
    index = bisect_left(keys, wanted << SIZE_SHIFT)
    if index < len(keys) and pool.block(keys[index]).expandable is None:
        return [pool.block(keys[index])]
    found: list[Block] = []
    released = 0
    for block in [pool.block(key) for key in reversed(keys[:index])]:
        if released >= wanted or block.size < limit:
            break
        if block.expandable is None:
            released += block.size
            found.append(block)
    return found


def garbage_blocks(pool: BlockPool, target: int) -> list[Block]:
    """Return whole segments at least as old as the mean age of those left, in repeated passes.

    Args:
        pool: the pool to search; a block's age is the number of searches since it became free.
        target: bytes after which no further pass is made.

    Source: ``garbage_collect_cached_blocks``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
    """
    whole = [block for block in pool if not block.is_split]
    age, reclaimed, freed = sum(pool.calls - block.gc_base for block in whole), 0, True
    count = len(whole)
    found: list[Block] = []
    while reclaimed < target and freed and count > 0:
        oldest, freed = age / count, False
        for block in list(whole):
            if block.expandable is None and pool.calls - block.gc_base >= oldest:
                freed = True
                reclaimed += block.size
                age -= pool.calls - block.gc_base
                count -= 1
                whole.remove(block)
                found.append(block)
    return found
