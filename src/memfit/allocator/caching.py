"""PyTorch's native caching allocator, rule by rule.

    malloc(size)   round it -> smallest cached block of its stream and pool that is large enough
                   none: collect garbage -> cudaMalloc
                   none: give back an oversize block, cudaMalloc (where max_split_size says what that is)
                   none: wait for all streams, give back the whole cache, cudaMalloc again -> out of memory
                   split off what is left of the block
    free(block)    at once, or when the other streams that used it have gone on; merge with free neighbours

Nothing is behind it but a count of bytes (``device.py``), so it runs anywhere, under any settings and on any
capacity. What it did is in ``log``, one row for each change; ``statistics.py`` turns that into
``torch.cuda.memory_stats()``.

Source: ``DeviceCachingAllocator``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1; methods have their
counterparts' names. ``benchmarks/allocator_differential.py`` drives the two side by side.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator

from memfit import records
from memfit.allocator import expandable
from memfit.allocator.blocks import ADDRESS, ADDRESS_BITS, SIZE_SHIFT, Block, BlockPool, PrivatePool
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.device import DeviceMemory
from memfit.allocator.expandable import ExpandableSegment
from memfit.allocator.rounding import SMALL_SEGMENT, SMALL_SIZE, least_remainder, round_size, segment_size
from memfit.errors import UsageError
from memfit.records import DEFAULT_POOL, Segment

PoolId = tuple[int, int]
"""As PyTorch numbers private pools; ``DEFAULT_POOL`` is none of them."""

_NEVER = 1 << 62
"""Bytes that no block has."""
NUMBERED = (2, 12)
"""The first version of PyTorch that tells blocks of equal size apart by the age of their segment."""

# The log has rows of five numbers: kind, bytes, requested bytes, change of split blocks and of their bytes.
# The kinds of the small pool are these, those of the large pool LARGE more.
ALLOC, FREE, FREE_REQUESTED, FREE_COMPLETED = range(4)
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP = range(4, 8)
LARGE = 8
ROW = 5


class OutOfMemory(Exception):  # noqa: N818 - PyTorch's name for it
    """An allocation failed for good; the allocator is as it was, but for what it gave back on the way."""

    def __init__(self, size: int, free: int) -> None:
        super().__init__(f"{size:,} bytes cannot be allocated: the device has {free:,} left.")
        self.size = size
        """Bytes as requested."""
        self.free = free
        """Bytes that the device has left."""


class Event:
    """The end of a stream's use of a block."""

    __slots__ = ("block", "done")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.done = False


class CachingAllocator:
    """The allocator of one device.

    Args:
        memory: the device's.
        config: the settings in force.
        version: of PyTorch, major and minor: what it does that others do not.

    >>> allocator = CachingAllocator(DeviceMemory(80 << 30), AllocatorConfig())
    >>> block = allocator.malloc(11 << 20)
    >>> block.size, allocator.allocated, allocator.reserved
    (12582912, 12582912, 12582912)
    """

    def __init__(
        self, memory: DeviceMemory, config: AllocatorConfig, version: tuple[int, int] = (2, 14)
    ) -> None:
        self.memory = memory
        self.config = config
        self.small = BlockPool(None, small=True, least=least_remainder(config, small=True))
        self.large = BlockPool(None, small=False, least=least_remainder(config, small=False))
        self.pools: dict[PoolId, PrivatePool] = {}
        self.segments: dict[int, Block] = {}
        """The first block of every segment and every reservation, by address."""
        self.log: list[int] = []
        self.allocated = 0
        """Bytes in blocks that are in use."""
        self.reserved = 0
        """Bytes of segments."""
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_oom_rejections = 0
        self.num_sync_all_streams = 0
        self.num_device_alloc = 0
        self.num_device_free = 0
        self.captures = 0
        """CUDA graphs that are being captured: then no event may be asked for."""
        fraction = config.per_process_memory_fraction
        self._allowed = None if fraction is None else int(fraction * memory.total)
        self._limit = _NEVER if config.max_split_size is None else config.max_split_size
        # With expandable segments a block of any size is split.
        self._unsplit = _NEVER if config.expandable_segments else self._limit
        self._choosy = False
        self._choose_rules()
        self._numbered = version >= NUMBERED
        self._made = 0  # segments so far
        self._freeable: dict[PoolId, PrivatePool] = {}
        self._diverted: list[PoolId] = []
        self._events: dict[int, deque[Event]] = {}
        self._deferred: list[Block] = []  # freed during a capture, and used by other streams
        self._rounded: dict[int, int] = {}

    # ---- What PyTorch is asked for -------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate.

        The most frequent of all paths is written out here: find a block, and split off what it has beyond.

        Args:
            size: bytes as requested, at least 1.
            stream: the stream that uses it; any number that tells streams apart.

        Raises:
            OutOfMemory: the device does not have it.
            UsageError: the size is no size.
        """
        if self._events or self._deferred:
            self._process_events()
        rounded = self._rounded.get(size)
        if rounded is None:
            rounded = self._round(size)
        pool = self._pool(rounded) if self._diverted else self.small if rounded <= SMALL_SIZE else self.large
        keys = pool.keys.get(stream)
        if keys is None:
            keys = pool.keys[stream] = []
        index = bisect_left(keys, rounded << SIZE_SHIFT)
        if self._choosy:
            index = self._choose(pool, keys, index, rounded)
        if index < len(keys):
            block = pool.free.pop(keys.pop(index) & ADDRESS)
        else:
            block = self._new_block(pool, stream, rounded, size)
        remainder = block.size - rounded
        splits = bytes_split = 0
        if remainder >= pool.least and rounded < self._unsplit:
            if block.prev is None and block.next is None:
                splits, bytes_split = 1, remainder
            else:
                bytes_split = -rounded
            rest = block.split(rounded)
            address = rest.address
            rest.gc_base = pool.calls
            rest.key = key = remainder << SIZE_SHIFT | rest.number << ADDRESS_BITS | address
            pool.free[address] = rest
            insort(keys, key)
        elif block.prev is not None or block.next is not None:
            splits, bytes_split = -1, -block.size
        if block.expandable is not None:
            splits = bytes_split = 0
        block.free = False
        block.requested = size
        taken = block.size
        self.allocated += taken
        self.log += (ALLOC if pool.small else ALLOC + LARGE, taken, size, splits, bytes_split)
        return block

    def free(self, block: Block) -> None:
        """Free a block that ``malloc`` returned."""
        self.allocated -= block.size
        if not block.uses:
            self._free_block(block, FREE)
            return
        block.waits = True
        self.log += (FREE_REQUESTED if block.pool.small else FREE_REQUESTED + LARGE, block.size, 0, 0, 0)
        if self.captures:
            self._deferred.append(block)
        else:
            self._insert_events(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses a block: once freed, it waits for that stream."""
        if stream != block.stream:
            if block.uses is None:
                block.uses = []
            if stream not in block.uses:
                block.uses.append(stream)

    def empty_cache(self, pool_id: PoolId = DEFAULT_POOL) -> None:
        """Give back every segment that is wholly free, or only those of a private pool that nobody uses."""
        self._release_cached_blocks(pool_id)

    def has_gone_on(self, stream: int) -> None:
        """Note that a stream is done with every freed block that it used."""
        if not self.captures:
            self._insert_deferred_events()
        for event in self._events.get(stream, ()):
            event.done = True

    def outstanding(self) -> Iterable[Event]:
        """Return the events that are waited for: whoever knows that one is over sets ``done``."""
        return [event for queue in self._events.values() for event in queue]

    def set_fraction(self, fraction: float) -> None:
        """Limit what may be reserved to a fraction of the device: ``set_per_process_memory_fraction``."""
        self._allowed = int(fraction * self.memory.total)
        self._choose_rules()

    def blocks(self) -> Iterator[Block]:
        """Return every block, free or not, mapped or not, by address."""
        for _, head in sorted(self.segments.items()):
            block: Block | None = head
            while block is not None:
                yield block
                block = block.next

    def snapshot(self) -> tuple[Segment, ...]:
        """Return every segment, by address, as ``torch.cuda.memory_snapshot()`` does.

        Of an expandable segment that is each range with memory behind it.
        """
        owners: dict[PrivatePool | None, PoolId] = {None: DEFAULT_POOL}
        owners |= {private: pool_id for pool_id, private in self.pools.items()}
        heads = (
            block for block in self.blocks() if block.mapped and (block.prev is None or not block.prev.mapped)
        )
        return tuple(_segment(head, owners[head.pool.owner]) for head in heads)

    # ---- Private pools -------------------------------------------------------------------------------

    def begin_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Take what is allocated from now on from a private pool, which is made if need be."""
        pool = self.pools.get(pool_id)
        if pool is None:
            self.pools[pool_id] = PrivatePool(least_small=self.small.least, least_large=self.large.least)
        else:
            pool.use_count += 1
        self._diverted.append(pool_id)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """End that."""
        self._diverted.remove(pool_id)

    def release_pool(self, pool_id: PoolId) -> None:
        """Note that a graph or a ``MemPool`` is gone: the last one's memory may be given back."""
        pool = self.pools[pool_id]
        pool.use_count -= 1
        if pool.use_count == 0:
            self._freeable[pool_id] = pool

    def _pool(self, rounded: int) -> BlockPool:
        pool = self.pools[self._diverted[-1]]
        return pool.small if rounded <= SMALL_SIZE else pool.large

    def _round(self, size: int) -> int:
        """Round a size that is new: training asks for the same ones again and again."""
        if size < 1:
            raise UsageError(f"A block of {size:,} bytes: PyTorch makes none of 0 bytes or fewer.")
        rounded = self._rounded[size] = round_size(size, self.config)
        return rounded

    # ---- Finding a block -----------------------------------------------------------------------------

    def _choose_rules(self) -> None:
        """Note whether the smallest block that is large enough is not always the one to take."""
        self._collects = self._allowed is not None and self.config.garbage_collection_threshold > 0
        self._choosy = self._collects or self._limit != _NEVER or self.config.expandable_segments

    def _choose(self, pool: BlockPool, keys: list[int], index: int, size: int) -> int:
        """Return the index of the block to take, from the first that is large enough on.

        None is the number of keys. This is ``get_free_block`` beyond the search itself.
        """
        if self._collects:
            pool.calls += 1
        if index == len(keys):
            return index
        block = pool.free[keys[index] & ADDRESS]
        if block.expandable is not None:
            index = self._best_expandable(pool, keys, index)
            if index == len(keys):
                return index
            block = pool.free[keys[index] & ADDRESS]
        if size < self._limit <= block.size:
            return len(keys)
        if size >= self._limit and block.size >= size + self.config.max_non_split_rounding:
            return len(keys)
        return index

    def _best_expandable(self, pool: BlockPool, keys: list[int], index: int) -> int:
        """Return the index of the block to take, from one of an expandable segment on.

        A block that can grow counts with the size that it can grow to.
        """
        if not self.config.expandable_segments:  # switched off since
            while index < len(keys) and pool.block(keys[index]).expandable is not None:
                index += 1
            return index
        block = pool.block(keys[index])
        while block.expandable is not None and index + 1 < len(keys):
            following = pool.block(keys[index + 1])
            if _size_to_grow_to(following) >= _size_to_grow_to(block):
                break
            block, index = following, index + 1
        return index

    def _new_block(self, pool: BlockPool, stream: int, size: int, requested: int) -> Block:
        """Get memory from the device, whatever it takes."""
        if self._collects:
            self._garbage_collect_cached_blocks()
        block = self._alloc_block(pool, stream, size)
        if block is None and self._release_available_cached_blocks(pool, stream, size):
            block = self._alloc_block(pool, stream, size)
        if block is None and not self.captures:
            self._release_cached_blocks()
            self.num_alloc_retries += 1
            block = self._alloc_block(pool, stream, size)
        if block is None:
            self.num_ooms += 1
            raise OutOfMemory(requested, self.memory.total - self.memory.used)
        return block

    def _alloc_block(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        wanted = segment_size(size, self.config)
        if self._allowed is not None and self.reserved + wanted > self._allowed:
            return None
        if self.config.throw_on_cudamalloc_oom and wanted > self.memory.total - self.memory.used:
            self.num_oom_rejections += 1
            raise OutOfMemory(size, self.memory.total - self.memory.used)
        if self.config.expandable_segments:
            block = self._try_allocate_expandable_block(pool, stream, size)
            if block is not None and pool.owner is not None:
                pool.owner.pieces += 1
            return block
        address = self.memory.malloc(wanted)
        if not address:
            return None
        if pool.owner is not None:
            pool.owner.pieces += 1
        self.num_device_alloc += 1
        self.reserved += wanted
        self.log += (SEGMENT_ALLOC if pool.small else SEGMENT_ALLOC + LARGE, wanted, 0, 0, 0)
        self._made += self._numbered
        block = self.segments[address] = Block(stream, wanted, pool, address, self._made)
        return block

    # ---- Expandable segments -------------------------------------------------------------------------

    def _try_allocate_expandable_block(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        block = expandable.find(pool, stream, size)
        if block is None:
            handle = SMALL_SEGMENT if pool.small else self.config.large_segment_size
            block = expandable.reserve(pool, stream, ExpandableSegment(self.memory, handle))
            self.segments[block.address] = block
        if not block.mapped:
            block = self._map_block(block, min(block.size, size))
        while block is not None and block.size < size:
            following = block.next
            if following is None:
                raise AssertionError("a block that can grow has something to grow into")
            block = self._map_block(following, min(size - block.size, following.size))
        if block is not None:
            pool.remove(block)
        return block

    def _map_block(self, block: Block, size: int) -> Block | None:
        """Put memory behind the beginning of a block; return it, or the free one before it that it joins."""
        segment, pool = block.expandable, block.pool
        if segment is None:
            raise AssertionError("only expandable segments are mapped")
        mapped = segment.map(size)
        if not mapped:
            return None
        pool.remove_unmapped(block)
        if mapped < block.size:
            pool.add_unmapped(block.split(mapped))
        block.mapped = True
        block = self._merged(block)
        pool.add(block)
        self.num_device_alloc += 1
        self.reserved += mapped
        self.log += (SEGMENT_MAP if pool.small else SEGMENT_MAP + LARGE, mapped, 0, 0, 0)
        return block

    def _unmap_block(self, block: Block) -> None:
        segment, pool = block.expandable, block.pool
        if segment is None:
            raise AssertionError("only expandable segments are unmapped")
        address, size = segment.unmap(block.address, block.size)
        if size == 0:
            return
        self.all_have_gone_on()
        pool.remove(block)
        if address > block.address:
            kept = block
            block = kept.split(address - kept.address)
            pool.add(kept)
        if block.size > size:
            pool.add(block.split(size))
        block.mapped = False
        block = self._merged(block)
        pool.add_unmapped(block)
        self.num_device_free += 1
        self.reserved -= size
        self.log += (SEGMENT_UNMAP if pool.small else SEGMENT_UNMAP + LARGE, size, 0, 0, 0)
        if pool.owner is not None:
            pool.owner.pieces -= 1
        if not block.is_split:
            pool.remove_unmapped(block)
            del self.segments[block.address]
            segment.release()

    def _merged(self, block: Block) -> Block:
        """Merge a block that no pool has with free neighbours that are mapped, or not, as it is."""
        before, after = block.prev, block.next
        if after is not None and after.free and after.mapped == block.mapped:
            _forget(after)
            block.swallow(after)
        if before is not None and before.free and before.mapped == block.mapped:
            _forget(before)
            before.swallow(block)
            return before
        return block

    # ---- Giving back ---------------------------------------------------------------------------------

    def _free_block(self, block: Block, kind: int) -> None:
        """Make a block free: the other frequent path."""
        size = block.size
        requested = block.requested
        pool = block.pool
        keys = pool.keys[block.stream]
        splits = bytes_split = 0
        block.free = True
        other = block.next
        if other is not None and other.free and other.mapped:
            del keys[bisect_left(keys, other.key)]
            del pool.free[other.address]
            splits, bytes_split = -1, -other.size
            block.swallow(other)
        other = block.prev
        if other is not None and other.free and other.mapped:
            del keys[bisect_left(keys, other.key)]
            splits -= 1
            bytes_split -= other.size
            other.swallow(block)
            block = other
        else:
            pool.free[block.address] = block
        block.gc_base = pool.calls
        block.key = key = block.size << SIZE_SHIFT | block.number << ADDRESS_BITS | block.address
        insort(keys, key)
        if block.expandable is not None:
            splits = bytes_split = 0
        elif block.prev is not None or block.next is not None:
            splits += 1
            bytes_split += block.size
        self.log += (kind if pool.small else kind + LARGE, size, requested, splits, bytes_split)

    def _release_block(self, block: Block) -> None:
        pool = block.pool
        pool.remove(block)
        del self.segments[block.address]
        self.memory.free(block.address, block.size)
        self.all_have_gone_on()
        self.num_device_free += 1
        self.reserved -= block.size
        if pool.owner is not None:
            pool.owner.pieces -= 1
        self.log += (SEGMENT_FREE if pool.small else SEGMENT_FREE + LARGE, block.size, 0, 0, 0)

    def _release_blocks(self, pool: BlockPool) -> None:
        grown = []
        for block in pool:
            if block.expandable is not None:
                grown.append(block)
            elif not block.is_split:
                self._release_block(block)
        for block in grown:
            self._unmap_block(block)

    def _release_cached_blocks(self, only: PoolId = DEFAULT_POOL) -> None:
        if not self.captures:  # also within ``use_mem_pool``
            self._synchronize_and_free_events()
            if only == DEFAULT_POOL:
                self._release_blocks(self.large)
                self._release_blocks(self.small)
        for pool_id, pool in list(self._freeable.items()):
            if only not in (DEFAULT_POOL, pool_id):
                continue
            self._release_blocks(pool.small)
            self._release_blocks(pool.large)
            if pool.pieces == 0:
                del self.pools[pool_id], self._freeable[pool_id]

    def _release_available_cached_blocks(self, pool: BlockPool, stream: int, size: int) -> bool:
        """Give back one oversize block that is large enough, or several from the largest down."""
        limit = self.config.max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        keys = pool.of(stream)
        index = bisect_left(keys, wanted << SIZE_SHIFT)
        if index < len(keys) and pool.block(keys[index]).expandable is None:
            self._release_block(pool.block(keys[index]))
            return True
        released = 0
        for block in [pool.block(key) for key in reversed(keys[:index])]:
            if released >= wanted or block.size < limit:
                break
            if block.expandable is None:
                released += block.size
                self._release_block(block)
        return released >= wanted

    def _garbage_collect_cached_blocks(self) -> None:
        """Give back whole segments of the large pool that were not used for long, once much is reserved."""
        threshold = int(self.config.garbage_collection_threshold * (self._allowed or 0))
        if self.reserved <= threshold:
            return
        target = self.reserved - threshold
        pool = self.large
        whole = [block for block in pool if not block.is_split]
        age, reclaimed, freed = sum(pool.calls - block.gc_base for block in whole), 0, True
        count = len(whole)
        while reclaimed < target and freed and count > 0:
            oldest, freed = age / count, False
            for block in list(whole):
                if block.expandable is None and pool.calls - block.gc_base >= oldest:
                    freed = True
                    reclaimed += block.size
                    age -= pool.calls - block.gc_base
                    count -= 1
                    whole.remove(block)
                    self._release_block(block)

    # ---- Streams -------------------------------------------------------------------------------------

    def _insert_events(self, block: Block) -> None:
        for stream in block.uses or ():
            block.events += 1
            self._events.setdefault(stream, deque()).append(Event(block))
        block.uses = None

    def _insert_deferred_events(self) -> None:
        for block in self._deferred:
            self._insert_events(block)
        self._deferred = []

    def _process_events(self) -> None:
        """Free blocks whose other streams have gone on; each stream's events end in their order."""
        if self.captures:
            return
        self._insert_deferred_events()
        for stream, queue in list(self._events.items()):
            while queue and queue[0].done:
                self._ended(queue.popleft().block)
            if not queue:
                del self._events[stream]

    def _synchronize_and_free_events(self) -> None:
        self.num_sync_all_streams += 1
        self.memory.calls.synchronize += 1
        self._insert_deferred_events()
        events, self._events = self._events, {}
        for queue in events.values():
            for event in queue:
                self._ended(event.block)

    def all_have_gone_on(self) -> None:
        """Note that every stream has gone on: CUDA waits for all where memory goes back to the device."""
        for event in self.outstanding():
            event.done = True

    def _ended(self, block: Block) -> None:
        block.events -= 1
        if block.events == 0:
            block.waits = False
            self._free_block(block, FREE_COMPLETED)


def _forget(block: Block) -> None:
    """Take a free block that another one swallows out of its pool."""
    if block.mapped:
        block.pool.remove(block)
    else:
        block.pool.remove_unmapped(block)


def _segment(head: Block, pool_id: PoolId) -> Segment:
    blocks, block, address = [], head, head.address
    while block is not None and block.mapped:
        requested = 0 if block.free else block.requested
        blocks.append(records.Block(block.address, block.size, requested, _state(block)))
        address += block.size
        block = block.next  # type: ignore[assignment]
    return Segment(
        address=head.address,
        size=address - head.address,
        stream=head.stream,
        kind="small" if head.pool.small else "large",
        pool=pool_id,
        expandable=head.expandable is not None,
        blocks=tuple(blocks),
    )


def _state(block: Block) -> str:
    if block.free:
        return "inactive"
    return "active_awaiting_free" if block.waits else "active_allocated"


def _size_to_grow_to(block: Block) -> int:
    following = block.next
    return block.size + (following.size if following is not None and not following.mapped else 0)
