"""The blocks of expandable segments: how they are found, mapped, unmapped and merged.

    reservation, 9/8 of the device
    |--- live ---|--- free ---|------------ unmapped ------------|--- live ---|--- unmapped ...
                              |  handle  |  handle  |                 handles of 2 MiB, in the large
                                                                      pool of large_segment_size

Source: Note [Expandable Segments], ``ExpandableSegment``, ``find_expandable_block``, ``map_block`` and
``unmap_block``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
"""

from support.reference_allocator.blocks import Block, BlockPool
from support.reference_allocator.expandable_segment import ExpandableSegment


def find_expandable_block(pool: BlockPool, stream: int, size: int) -> Block | None:
    """Return the lowest block that starts ``size`` free or unmapped bytes, or None.

    The block itself may be mapped; then the next one is not.
    """
    for unmapped in pool.unmapped.get(stream, ()):
        before = unmapped.prev
        first = before if before is not None and before.free else unmapped
        room, block = 0, first
        while room < size and block is not None and block.free:
            room += block.size
            block = block.next  # type: ignore[assignment]
        if room >= size:
            return first
    return None


def reserve_segment(pool: BlockPool, stream: int, segment: ExpandableSegment) -> Block:
    """Return a new expandable segment as one unmapped block."""
    block = Block(stream, segment.size, pool, segment.address, 0)
    block.mapped = False
    block.expandable = segment
    pool.add_unmapped(block)
    return block


def release_segment(block: Block) -> None:
    """Release an expandable segment that is one unmapped block."""
    block.pool.remove_unmapped(block)
    _segment_of(block).release()


def map_block(block: Block, size: int) -> tuple[Block, int]:
    """Map the beginning of an unmapped block.

    Args:
        block: in its pool's ``unmapped``.
        size: bytes, at most the block's.

    Returns:
        The block, or the free one before it that it was merged into, and the bytes mapped: whole handles;
        0 if the device has too few left.
    """
    pool = block.pool
    mapped = _segment_of(block).map(size)
    if not mapped:
        return block, 0
    pool.remove_unmapped(block)
    if mapped < block.size:
        pool.add_unmapped(block.split(mapped))
    block.mapped = True
    block = _merged(block)
    pool.add(block)
    return block, mapped


def unmap_block(block: Block) -> tuple[Block, int]:
    """Unmap the handles that lie entirely within a free block.

    Returns:
        The unmapped block, and the bytes unmapped; 0 if there is no such handle.
    """
    pool = block.pool
    address, size = _segment_of(block).unmap(block.address, block.size)
    if size == 0:
        return block, 0
    pool.remove(block)
    if address > block.address:
        kept = block
        block = kept.split(address - kept.address)
        pool.add(kept)
    if block.size > size:
        pool.add(block.split(size))
    block.mapped = False
    block = _merged(block)
    pool.add_unmapped(block)
    return block, size


def best_to_grow(pool: BlockPool, keys: list[int], index: int) -> int:
    """Return the index of the block to take, given that of the first that is large enough.

    A block that can grow counts with the size it can grow to.

    Source: ``get_free_block``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
    """
    block = pool.block(keys[index])
    while block.expandable is not None and index + 1 < len(keys):
        following = pool.block(keys[index + 1])
        if _size_to_grow_to(following) >= _size_to_grow_to(block):
            break
        block, index = following, index + 1
    return index


def first_not_expandable(pool: BlockPool, keys: list[int], index: int) -> int:
    """Return the index of the first block, from ``index`` on, that is not in an expandable segment."""
    while index < len(keys) and pool.block(keys[index]).expandable is not None:
        index += 1
    return index


def _size_to_grow_to(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)


def _merged(block: Block) -> Block:
    """Merge a block that is in no pool with free neighbours that are mapped, or unmapped, like it."""
    before, after = block.prev, block.next
    if after is not None and after.free and after.mapped == block.mapped:
        _forget(after)
        block.absorb(after)
    if before is not None and before.free and before.mapped == block.mapped:
        _forget(before)
        before.absorb(block)
        return before
    return block


def _forget(block: Block) -> None:
    """Remove a free block from its pool because another block absorbs it."""
    if block.mapped:
        block.pool.remove(block)
    else:
        block.pool.remove_unmapped(block)


def _segment_of(block: Block) -> ExpandableSegment:
    if block.expandable is None:
        raise AssertionError(
            f"Internal error: cannot map or unmap the block at {block.address:#x}, because its segment is "
            "not expandable. Please report this."
        )
    return block.expandable
