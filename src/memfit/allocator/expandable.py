"""Expandable segments: a range of addresses for each stream and pool, and memory behind it as it is needed.

    reservation, 9/8 of the device
    |--- live ---|--- free ---|----------- not mapped -----------|--- live ---|--- not mapped ...
                              |  handle  |  handle  |                 handles of 2 MiB, in the large
                                                                      pool of large_segment_size

Source: Note [Expandable Segments], ``ExpandableSegment`` and ``find_expandable_block``,
c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
"""

from memfit.allocator.blocks import Block, BlockPool
from memfit.allocator.device import DeviceMemory


class ExpandableSegment:
    """A reservation and its handles: pieces of memory of one size."""

    __slots__ = ("_memory", "address", "handle", "size")

    def __init__(self, memory: DeviceMemory, handle: int) -> None:
        self._memory = memory
        self.handle = handle
        """Bytes of each."""
        self.size = -(-(memory.total + memory.total // 8) // handle) * handle
        self.address = memory.reserve(self.size)

    def map(self, size: int) -> int:
        """Put memory behind ``size`` bytes that begin with a handle, rounded up to whole handles.

        Returns:
            The bytes that have memory now; 0 if the device has not so much left.
        """
        pieces = -(-size // self.handle)
        return pieces * self.handle if self._memory.map(pieces, self.handle) else 0

    def unmap(self, address: int, size: int) -> tuple[int, int]:
        """Give back the handles that lie wholly within ``[address, address + size)``.

        Returns:
            Where they begin, and their bytes; 0 bytes if there are none.
        """
        begin = -(-(address - self.address) // self.handle)
        end = (address + size - self.address) // self.handle
        if begin >= end:
            return address, 0
        self._memory.unmap(end - begin, self.handle)
        return self.address + begin * self.handle, (end - begin) * self.handle

    def release(self) -> None:
        """Give the addresses back."""
        self._memory.unreserve(self.address, self.size)


def find(pool: BlockPool, stream: int, size: int) -> Block | None:
    """Return the lowest block from which on ``size`` bytes are free or not yet mapped, or None.

    The block itself may be mapped: then the one after it is not.
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


def reserve(pool: BlockPool, stream: int, segment: ExpandableSegment) -> Block:
    """Return a new reservation as a block that is not mapped."""
    block = Block(stream, segment.size, pool, segment.address, 0)
    block.mapped = False
    block.expandable = segment
    pool.add_unmapped(block)
    return block
