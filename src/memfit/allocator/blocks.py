"""Blocks, and the pools that keep the free ones in the order of best fit.

    segment (one cudaMalloc)
    |---- a ----|-- b --|------ c ------|      a.next is b, b.prev is a
       free       live        free             free blocks are in their pool; neighbours that are free are one

A pool looks for the smallest block that is large enough; of several, for the one whose segment was made
first, and in it for the one with the lowest address. PyTorch up to 2.11 asks for the address alone.

    keys   size, number of the segment and address in one int, sorted, one list a stream
    free   address -> Block

Source: ``Block``, ``BlockPool`` and ``BlockComparatorSize``, c10/cuda/CUDACachingAllocator.cpp; that segments
count was seen by driving PyTorch 2.8 to 2.15 (``benchmarks/allocator_differential.py``).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.allocator.expandable import ExpandableSegment

_ADDRESS_BITS = 48
_ADDRESS = (1 << _ADDRESS_BITS) - 1
_NUMBER_BITS = 32
_SIZE_SHIFT = _NUMBER_BITS + _ADDRESS_BITS


class Block:
    """A piece of a segment."""

    __slots__ = (
        "address",
        "allocated",
        "events",
        "expandable",
        "free",
        "gc_base",
        "mapped",
        "next",
        "number",
        "pool",
        "prev",
        "requested",
        "size",
        "stream",
        "uses",
    )

    def __init__(self, stream: int, size: int, pool: "BlockPool", address: int, number: int = 0) -> None:
        self.stream = stream
        self.number = number
        """Of its segment, in the order in which they were made."""
        self.size = size
        self.pool = pool
        self.address = address
        self.requested = 0
        self.allocated = False
        self.free = True
        """Whether it may be taken or merged; also of a block that is not mapped."""
        self.mapped = True
        self.events = 0
        """Uses by other streams that are not known to have ended."""
        self.uses: set[int] | None = None
        """Other streams that use it."""
        self.gc_base = 0
        self.prev: Block | None = None
        self.next: Block | None = None
        self.expandable: ExpandableSegment | None = None

    @property
    def is_split(self) -> bool:
        """Whether it is less than its whole segment."""
        return self.prev is not None or self.next is not None


class BlockPool:
    """The free blocks of one pool: the small or the large ones of the default or of a private pool."""

    __slots__ = ("calls", "free", "keys", "owner", "small", "unmapped")

    def __init__(self, owner: "PrivatePool | None", *, small: bool) -> None:
        self.small = small
        self.owner = owner
        self.keys: dict[int, list[int]] = {}
        self.free: dict[int, Block] = {}
        self.unmapped: dict[int, list[Block]] = {}
        """Of expandable segments, what no memory is behind; by stream, in the order of addresses."""
        self.calls = 0
        """Searches so far: the clock of garbage collection."""

    def add(self, block: Block) -> None:
        """Add a free block."""
        block.gc_base = self.calls
        self.free[block.address] = block
        keys = self.keys.get(block.stream)
        if keys is None:
            keys = self.keys[block.stream] = []
        insort(keys, _key(block))

    def remove(self, block: Block) -> None:
        """Take a block out."""
        keys = self.keys[block.stream]
        del keys[bisect_left(keys, _key(block))]
        del self.free[block.address]

    def at_least(self, stream: int, size: int) -> tuple[list[int], int]:
        """Return a stream's keys, and the index of the first block of at least this size."""
        keys = self.keys.get(stream, [])
        return keys, bisect_left(keys, size << _SIZE_SHIFT)

    def block(self, key: int) -> Block:
        """Return the block of a key."""
        return self.free[key & _ADDRESS]

    def __iter__(self) -> Iterator[Block]:
        """Return the blocks as they are now, by stream, size and address."""
        return iter([self.free[key & _ADDRESS] for stream in sorted(self.keys) for key in self.keys[stream]])

    def add_unmapped(self, block: Block) -> None:
        """Add what no memory is behind."""
        insort(self.unmapped.setdefault(block.stream, []), block, key=_address_of)

    def remove_unmapped(self, block: Block) -> None:
        """Take it out."""
        blocks = self.unmapped[block.stream]
        del blocks[bisect_left(blocks, block.address, key=_address_of)]


class PrivatePool:
    """The pools of a CUDA graph or a ``torch.cuda.MemPool``."""

    __slots__ = ("large", "no_split", "pieces", "small", "use_count", "use_on_oom")

    def __init__(self) -> None:
        self.small = BlockPool(self, small=True)
        self.large = BlockPool(self, small=False)
        self.use_count = 1
        """Graphs and ``MemPool`` objects that use it."""
        self.pieces = 0
        """Segments and mappings that were made for it and not yet given back."""
        self.no_split = False
        self.use_on_oom = False


def _key(block: Block) -> int:
    return block.size << _SIZE_SHIFT | block.number << _ADDRESS_BITS | block.address


def _address_of(block: Block) -> int:
    return block.address
