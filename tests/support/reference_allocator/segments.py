"""The segments of an allocator: how it gets memory from the device, and releases it.

    one cudaMalloc each          _alloc_segment                     _release_block
    expandable, by handles       _try_allocate_expandable_block     _unmap_block

``caching_allocator.py`` decides which block to take, and which segment to release.

Source: ``alloc_block``, ``release_block``, ``try_allocate_expandable_block``, ``map_block`` and
``unmap_block`` of ``DeviceCachingAllocator``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
"""

from collections.abc import Iterator

from memfit.allocator.block_and_segment_sizes import SMALL_SEGMENT
from memfit.allocator.config import AllocatorConfig
from support.reference_allocator import expandable_blocks
from support.reference_allocator.blocks import Block, BlockPool
from support.reference_allocator.change_log import (
    LARGE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
)
from support.reference_allocator.device_memory import DeviceMemory
from support.reference_allocator.expandable_segment import ExpandableSegment
from support.reference_allocator.stream_events import StreamEventQueues


class Segments:
    """The memory that an allocator holds from its device.

    Args:
        memory: the device's.
        config: the settings in force.
        numbered: whether the age of their segment orders blocks of equal size.
    """

    def __init__(self, memory: DeviceMemory, config: AllocatorConfig, *, numbered: bool) -> None:
        self.memory = memory
        self.config = config
        self.segments: dict[int, Block] = {}
        """The first block of every segment and every reservation, by address."""
        self.events = StreamEventQueues()
        """The events that freed blocks wait for."""
        self.log: list[int] = []
        """Every change, in the rows of ``change_log.py``."""
        self.reserved = 0
        """Bytes of segments."""
        self.num_device_alloc = 0
        self.num_device_free = 0
        self._numbered = numbered
        self._made = 0  # segments so far

    def all_streams_are_done(self) -> None:
        """Record that every stream is done: CUDA waits for all streams when memory is released."""
        self.events.end_all()

    def blocks(self) -> Iterator[Block]:
        """Return every block, free or not, mapped or not, by address."""
        for _, head in sorted(self.segments.items()):
            block: Block | None = head
            while block is not None:
                yield block
                block = block.next

    # ---- One cudaMalloc each -------------------------------------------------------------------------

    def _alloc_segment(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        address = self.memory.malloc(size)
        if address is None:
            return None
        self._count_new(pool, size, SEGMENT_ALLOC)
        self._made += self._numbered
        block = self.segments[address] = Block(stream, size, pool, address, self._made)
        return block

    def _release_block(self, block: Block) -> None:
        block.pool.remove(block)
        del self.segments[block.address]
        self.memory.free(block.address, block.size)
        self.all_streams_are_done()
        self._count_release(block.pool, block.size, SEGMENT_FREE)

    # ---- Expandable segments -------------------------------------------------------------------------

    def _try_allocate_expandable_block(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        block = expandable_blocks.find_expandable_block(pool, stream, size)
        if block is None:
            handle = SMALL_SEGMENT if pool.small else self.config.large_segment_size
            block = expandable_blocks.reserve_segment(pool, stream, ExpandableSegment(self.memory, handle))
            self.segments[block.address] = block
        if not block.mapped:
            block = self._map_block(block, min(block.size, size))
        while block is not None and block.size < size:
            following = block.next
            if following is None:
                raise AssertionError(
                    f"Internal error: cannot grow the block at {block.address:#x}, because no unmapped block "
                    "follows it. Please report this."
                )
            block = self._map_block(following, min(size - block.size, following.size))
        if block is not None:
            pool.remove(block)
        return block

    def _map_block(self, block: Block, size: int) -> Block | None:
        block, mapped = expandable_blocks.map_block(block, size)
        if not mapped:
            return None
        self._count_new(block.pool, mapped, SEGMENT_MAP)
        return block

    def _unmap_block(self, block: Block) -> None:
        block, unmapped = expandable_blocks.unmap_block(block)
        if not unmapped:
            return
        self.all_streams_are_done()
        self._count_release(block.pool, unmapped, SEGMENT_UNMAP)
        if not block.is_split:
            expandable_blocks.release_segment(block)
            del self.segments[block.address]

    # ---- Counting ------------------------------------------------------------------------------------

    def _count_new(self, pool: BlockPool, size: int, kind: int) -> None:
        self.num_device_alloc += 1
        self.reserved += size
        self.log += (kind if pool.small else kind + LARGE, size, 0, 0, 0)

    def _count_release(self, pool: BlockPool, size: int, kind: int) -> None:
        self.num_device_free += 1
        self.reserved -= size
        if pool.owner is not None:
            pool.owner.pieces -= 1
        self.log += (kind if pool.small else kind + LARGE, size, 0, 0, 0)
