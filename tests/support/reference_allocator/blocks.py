"""Blocks, and the pools that keep the free ones in the order of best fit.

    segment (one cudaMalloc)
    |---- a ----|-- b --|------ c ------|      a.next is b, b.prev is a
       free       live        free             free blocks are in their pool; free neighbours are merged

A pool returns the smallest block that is large enough; among equals, the one whose segment was made first,
and in that segment the one with the lowest address. Up to PyTorch 2.11 the address alone decides.

    keys   size, number of the segment and address in one int, sorted, one list per stream
    free   address -> Block

Source: ``Block``, ``BlockPool`` and ``BlockComparatorSize``, c10/cuda/CUDACachingAllocator.cpp; the rule
about the age of segments was found by driving them (``tests/allocator/test_differential.py``).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.reference_allocator.expandable_segment import ExpandableSegment

ADDRESS_BITS = 80  # more than a process has: with unlimited memory, reservations exceed 64
ADDRESS = (1 << ADDRESS_BITS) - 1
_NUMBER_BITS = 32
SIZE_SHIFT = _NUMBER_BITS + ADDRESS_BITS
"""A key's size begins here: ``size << SIZE_SHIFT`` comes before every block of that size."""

PoolId = tuple[int, int]
"""PyTorch's id of a private pool; ``DEFAULT_POOL`` is not one."""


class Block:
    """A block of a segment. The first block of a segment remains its first until the segment is released."""

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
        """Number of its segment, in order of creation."""
        self.free = True
        """Whether it may be allocated or merged; also true of an unmapped block."""
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.expandable: ExpandableSegment | None = None
        self.uses: list[int] | None = None
        """Other streams that use the block."""
        self.events = 0
        """Once freed: events of other streams that have not completed."""
        self.waits = False
        """Whether the block was freed and waits for other streams."""
        self.requested: int
        """Bytes, as requested; of a block in use only."""
        self.gc_base: int
        """The pool's ``calls`` when the block became free: searches since then are its age."""
        self.key: int
        """Its sort key in the pool, while free and mapped."""

    @property
    def is_split(self) -> bool:
        """Whether the block is less than its whole segment."""
        return self.prev is not None or self.next is not None

    def split(self, size: int) -> "Block":
        """Shorten the block to its first ``size`` bytes; return the rest, which is in no pool yet."""
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

    def absorb(self, following: "Block") -> None:
        """Absorb the next block."""
        self.size += following.size
        after = self.next = following.next
        if after is not None:
            after.prev = self


class BlockPool:
    """The free blocks of one pool: the small or the large ones of the default or of a private pool.

    Args:
        owner: the private pool it belongs to, if any.
        small: whether it holds blocks of up to 1 MiB.
        least: the smallest remainder, in bytes, that becomes a block of its own.
    """

    __slots__ = ("calls", "free", "keys", "least", "owner", "small", "unmapped")

    def __init__(self, owner: "PrivatePool | None", *, small: bool, least: int) -> None:
        self.small = small
        self.owner = owner
        self.least = least
        self.keys: dict[int, list[int]] = {}
        self.free: dict[int, Block] = {}
        self.unmapped: dict[int, list[Block]] = {}
        """Unmapped blocks of expandable segments, by stream, in order of address."""
        self.calls = 0
        """Searches so far: the clock of garbage collection."""

    def of(self, stream: int) -> list[int]:
        """Return the keys of a stream."""
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
        """Remove a free block."""
        keys = self.keys[block.stream]
        del keys[bisect_left(keys, block.key)]
        del self.free[block.address]

    def block(self, key: int) -> Block:
        """Return the block with a key."""
        return self.free[key & ADDRESS]

    def __iter__(self) -> Iterator[Block]:
        """Iterate over a snapshot of the free blocks, by stream, size, number and address."""
        return iter([self.free[key & ADDRESS] for stream in sorted(self.keys) for key in self.keys[stream]])

    def add_unmapped(self, block: Block) -> None:
        """Add an unmapped block."""
        insort(self.unmapped.setdefault(block.stream, []), block, key=_address_of)

    def remove_unmapped(self, block: Block) -> None:
        """Remove an unmapped block."""
        blocks = self.unmapped[block.stream]
        del blocks[bisect_left(blocks, block.address, key=_address_of)]


class PrivatePool:
    """The pools of a CUDA graph or a ``torch.cuda.MemPool``."""

    __slots__ = ("id", "large", "pieces", "small", "use_count")

    def __init__(self, pool_id: PoolId, *, least_small: int, least_large: int) -> None:
        self.id = pool_id
        """PyTorch's id."""
        self.small = BlockPool(self, small=True, least=least_small)
        self.large = BlockPool(self, small=False, least=least_large)
        self.use_count = 1
        """Graphs and ``MemPool`` objects that use the pool."""
        self.pieces = 0
        """Segments and mappings made for the pool and not released yet; PyTorch's ``cudaMalloc_count``."""


def _address_of(block: Block) -> int:
    return block.address
