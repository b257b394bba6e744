"""Blocks, and the pools that keep the free ones in the order of best fit.

    segment (one cudaMalloc)
    |---- a ----|-- b --|------ c ------|      a.next is b, b.prev is a
       free       live        free             free blocks are in their pool; neighbours that are free are one

A pool looks for the smallest block that is large enough; of several, for the one whose segment was made
first, and in it for the one with the lowest address. PyTorch up to 2.11 asks for the address alone.

    keys   size, number of the segment and address in one int, sorted, one list a stream
    free   address -> Block

Source: ``Block``, ``BlockPool`` and ``BlockComparatorSize``, c10/cuda/CUDACachingAllocator.cpp; that the
age of segments decides was found by driving PyTorch 2.8 to 2.15 (``benchmarks/allocator_differential.py``).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memfit.allocator.expandable_segment import ExpandableSegment

ADDRESS_BITS = 80  # more than a process has: reservations of a device without end lie beyond 64
ADDRESS = (1 << ADDRESS_BITS) - 1
_NUMBER_BITS = 32
SIZE_SHIFT = _NUMBER_BITS + ADDRESS_BITS
"""A key's size begins here: ``size << SIZE_SHIFT`` comes before every block of that size."""

PoolId = tuple[int, int]
"""As PyTorch numbers private pools; ``DEFAULT_POOL`` is none of them."""


class Block:
    """A piece of a segment. The first of a segment stays that for as long as the segment is there."""

    __slots__ = (
        "address",
        "events",
        "expandable",
        "free",
        "gc_base",
        "key",
        "mapped",
        "next",
        "number",
        "pool",
        "prev",
        "requested",
        "size",
        "stream",
        "uses",
        "waits",
    )

    def __init__(self, stream: int, size: int, pool: "BlockPool", address: int, number: int) -> None:
        self.stream = stream
        self.size = size
        self.pool = pool
        self.address = address
        self.number = number
        """Of its segment, in the order in which they were made."""
        self.free = True
        """Whether it may be taken or merged; also of a block that is not mapped."""
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.expandable: ExpandableSegment | None = None
        self.uses: list[int] | None = None
        """Other streams that use it."""
        self.events = 0
        """Uses by other streams that are not known to have ended, once it is freed."""
        self.waits = False
        """Whether it was freed and waits for other streams."""
        self.requested: int
        """Bytes as requested, of a block that is in use."""
        self.gc_base: int
        """How many searches the pool had seen when it became free: later ones are its age."""
        self.key: int
        """Its place in the pool's order, while it is free and mapped."""

    @property
    def is_split(self) -> bool:
        """Whether it is less than its whole segment."""
        return self.prev is not None or self.next is not None

    def split(self, size: int) -> "Block":
        """Shorten it to its first ``size`` bytes; return the rest, which no pool has yet."""
        rest = Block(self.stream, self.size - size, self.pool, self.address + size, self.number)
        rest.expandable = self.expandable
        rest.mapped = self.mapped
        after = rest.next = self.next
        if after is not None:
            after.prev = rest
        rest.prev = self
        self.next = rest
        self.size = size
        return rest

    def swallow(self, following: "Block") -> None:
        """Take in the block that follows."""
        self.size += following.size
        after = self.next = following.next
        if after is not None:
            after.prev = self


class BlockPool:
    """The free blocks of one pool: the small or the large ones of the default or of a private pool.

    Args:
        owner: the private pool that it belongs to, if any.
        small: whether it holds blocks of up to 1 MiB.
        least: bytes that what is left of a block must have to become a block of its own.
    """

    __slots__ = ("calls", "free", "keys", "least", "owner", "small", "unmapped")

    def __init__(self, owner: "PrivatePool | None", *, small: bool, least: int) -> None:
        self.small = small
        self.owner = owner
        self.least = least
        self.keys: dict[int, list[int]] = {}
        self.free: dict[int, Block] = {}
        self.unmapped: dict[int, list[Block]] = {}
        """Blocks of expandable segments with no memory behind them, by stream, in the order of addresses."""
        self.calls = 0
        """Searches so far: the clock of garbage collection."""

    def of(self, stream: int) -> list[int]:
        """Return a stream's keys."""
        keys = self.keys.get(stream)
        if keys is None:
            keys = self.keys[stream] = []
        return keys

    def add(self, block: Block) -> None:
        """Add a free block."""
        block.gc_base = self.calls
        self.free[block.address] = block
        block.key = block.size << SIZE_SHIFT | block.number << ADDRESS_BITS | block.address
        insort(self.of(block.stream), block.key)

    def remove(self, block: Block) -> None:
        """Take a block out."""
        keys = self.keys[block.stream]
        del keys[bisect_left(keys, block.key)]
        del self.free[block.address]

    def block(self, key: int) -> Block:
        """Return the block of a key."""
        return self.free[key & ADDRESS]

    def __iter__(self) -> Iterator[Block]:
        """Return the blocks as they are now, by stream, size, number and address."""
        return iter([self.free[key & ADDRESS] for stream in sorted(self.keys) for key in self.keys[stream]])

    def add_unmapped(self, block: Block) -> None:
        """Add a block with no memory behind it."""
        insort(self.unmapped.setdefault(block.stream, []), block, key=_address_of)

    def remove_unmapped(self, block: Block) -> None:
        """Take out a block with no memory behind it."""
        blocks = self.unmapped[block.stream]
        del blocks[bisect_left(blocks, block.address, key=_address_of)]


class PrivatePool:
    """The pools of a CUDA graph or a ``torch.cuda.MemPool``."""

    __slots__ = ("id", "large", "pieces", "small", "use_count")

    def __init__(self, pool_id: PoolId, *, least_small: int, least_large: int) -> None:
        self.id = pool_id
        """As PyTorch numbers it."""
        self.small = BlockPool(self, small=True, least=least_small)
        self.large = BlockPool(self, small=False, least=least_large)
        self.use_count = 1
        """Graphs and ``MemPool`` objects that use it."""
        self.pieces = 0
        """Segments and mappings that were made for it and not yet given back."""


def _address_of(block: Block) -> int:
    return block.address
