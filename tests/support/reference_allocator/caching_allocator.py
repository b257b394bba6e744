"""PyTorch's native caching allocator, rule by rule.

    malloc(size)   round the size -> smallest cached block of the stream and pool that is large enough
                   none: collect garbage -> cudaMalloc
                   failed: release an oversize block, cudaMalloc (only with max_split_size)
                   failed: wait for all streams, release the whole cache, cudaMalloc again -> out of memory
                   split off the remainder of the block
    free(block)    at once, or when the other streams that used it are done; merge with free neighbours

    here                    which block is taken, and when segments are made and released
    segments.py             how segments are made and released
    expandable_blocks.py    the same for expandable segments, handle by handle
    reclaim.py              which cached blocks to release when not all have to go
    stream_events.py        freed blocks that wait for other streams
    blocks.py               blocks, and the free ones in order of best fit
    device_memory.py        the device: a count of bytes

There is no memory behind it, so it runs anywhere, under any settings and with any capacity. ``log`` has one
row for each change; ``memory_stats.py`` turns it into ``torch.cuda.memory_stats()``.

Source: ``DeviceCachingAllocator``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1; methods have their
counterparts' names. ``tests/allocator/test_differential.py`` drives the two side by side.
"""

from bisect import bisect_left, insort

from memfit.allocator.block_and_segment_sizes import (
    SMALL_SIZE,
    least_split_remainder,
    round_size,
    segment_bytes_for_request,
)
from memfit.allocator.compiled_allocator import NUMBERED
from memfit.allocator.config import AllocatorConfig
from memfit.errors import UsageError
from memfit.records import DEFAULT_POOL, Segment
from support.reference_allocator import expandable_blocks
from support.reference_allocator.blocks import (
    ADDRESS,
    ADDRESS_BITS,
    SIZE_SHIFT,
    Block,
    BlockPool,
    PoolId,
    PrivatePool,
)
from support.reference_allocator.change_log import ALLOC, FREE, FREE_COMPLETED, FREE_REQUESTED, LARGE
from support.reference_allocator.device_memory import DeviceMemory, SimulatedOutOfMemoryError
from support.reference_allocator.memory_snapshot import snapshot
from support.reference_allocator.reclaim import garbage_blocks, oversize_blocks
from support.reference_allocator.segments import Segments

_NEVER = 1 << 62
"""Larger than any block."""


class CachingAllocator(Segments):
    """The allocator of one device.

    Args:
        memory: the device's.
        config: the settings in force.
        version: of PyTorch, major and minor: rules differ between versions.

    >>> allocator = CachingAllocator(DeviceMemory(80 << 30), AllocatorConfig())
    >>> block = allocator.malloc(11 << 20)
    >>> block.size, allocator.allocated, allocator.reserved
    (12582912, 12582912, 12582912)
    """

    def __init__(
        self, memory: DeviceMemory, config: AllocatorConfig, version: tuple[int, int] = (2, 14)
    ) -> None:
        super().__init__(memory, config, numbered=version >= NUMBERED)
        self.small = BlockPool(None, small=True, least=least_split_remainder(config, small=True))
        self.large = BlockPool(None, small=False, least=least_split_remainder(config, small=False))
        self.pools: dict[PoolId, PrivatePool] = {}
        self.allocated = 0
        """Bytes in blocks in use."""
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.num_oom_rejections = 0
        self.num_sync_all_streams = 0
        self.captures = 0
        """CUDA graphs being captured: during a capture no event may be queried."""
        fraction = config.per_process_memory_fraction
        self._allowed = None if fraction is None else int(fraction * memory.total)
        self._limit = _NEVER if config.max_split_size is None else config.max_split_size
        # With expandable segments a block of any size is split.
        self._unsplit = _NEVER if config.expandable_segments else self._limit
        self._overrides_best_fit = False
        self._choose_rules()
        self._freeable: dict[PoolId, PrivatePool] = {}
        self._diverted: list[PoolId] = []
        self._rounded: dict[int, int] = {}

    # ---- The allocator's interface -------------------------------------------------------------------

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Allocate a block.

        The hot path is inlined here: find a block, and split off its remainder.

        Args:
            size: bytes as requested, at least 1.
            stream: the stream that uses the block; any number that identifies it.

        Raises:
            SimulatedOutOfMemoryError: the device has too little memory left.
            UsageError: the size is less than 1.
        """
        events = self.events
        if events.queues or events.deferred:
            self._process_events()
        rounded = self._rounded.get(size)
        if rounded is None:
            rounded = self._round(size)
        pool = self._pool(rounded) if self._diverted else self.small if rounded <= SMALL_SIZE else self.large
        keys = pool.keys.get(stream)
        if keys is None:
            keys = pool.keys[stream] = []
        index = bisect_left(keys, rounded << SIZE_SHIFT)
        if self._overrides_best_fit:
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
            self.events.deferred.append(block)
        else:
            self.events.insert(block)

    def record_stream(self, block: Block, stream: int) -> None:
        """Record that another stream uses a block: once freed, the block waits for that stream."""
        if stream != block.stream:
            if block.uses is None:
                block.uses = []
            if stream not in block.uses:
                block.uses.append(stream)

    def empty_cache(self, pool_id: PoolId = DEFAULT_POOL) -> None:
        """Release every wholly free segment, or only those of one unused private pool."""
        self._release_cached_blocks(pool_id)

    def stream_is_done(self, stream: int) -> None:
        """Record that a stream is done with every freed block that it used."""
        if not self.captures:
            self.events.insert_deferred()
        self.events.end(stream)

    def snapshot(self) -> tuple[Segment, ...]:
        """Return every segment, by address, as ``torch.cuda.memory_snapshot()`` does."""
        return snapshot(self.blocks())

    def set_fraction(self, fraction: float) -> None:
        """Limit reserved memory to a fraction of the device: ``set_per_process_memory_fraction``."""
        self._allowed = int(fraction * self.memory.total)
        self._choose_rules()

    # ---- Private pools -------------------------------------------------------------------------------

    def begin_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Allocate from a private pool from now on; create it if necessary."""
        pool = self.pools.get(pool_id)
        if pool is None:
            self.pools[pool_id] = PrivatePool(
                pool_id, least_small=self.small.least, least_large=self.large.least
            )
        else:
            pool.use_count += 1
            self._freeable.pop(pool_id, None)
        self._diverted.append(pool_id)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Stop allocating from a private pool."""
        self._diverted.remove(pool_id)

    def release_pool(self, pool_id: PoolId) -> None:
        """Record that a graph or ``MemPool`` is gone: without users, a pool's memory may be released."""
        pool = self.pools[pool_id]
        pool.use_count -= 1
        if pool.use_count == 0:
            self._freeable[pool_id] = pool

    def _pool(self, rounded: int) -> BlockPool:
        pool = self.pools[self._diverted[-1]]
        return pool.small if rounded <= SMALL_SIZE else pool.large

    def _round(self, size: int) -> int:
        """Round a size seen for the first time: training requests the same sizes over and over."""
        if size < 1:
            raise UsageError(f"Cannot allocate {size:,} bytes: the size must be at least 1 byte.")
        rounded = self._rounded[size] = round_size(size, self.config)
        return rounded

    # ---- Finding a block -----------------------------------------------------------------------------

    def _choose_rules(self) -> None:
        """Determine whether any rule can override best fit."""
        self._collects = self._allowed is not None and self.config.garbage_collection_threshold > 0
        self._overrides_best_fit = self._collects or self._limit != _NEVER or self.config.expandable_segments

    def _choose(self, pool: BlockPool, keys: list[int], index: int, size: int) -> int:
        """Return the index of the block to take, given that of the first that is large enough.

        The number of keys stands for no block. This is ``get_free_block`` after the search itself.
        """
        if self._collects:
            pool.calls += 1
        if index == len(keys):
            return index
        block = pool.free[keys[index] & ADDRESS]
        if block.expandable is not None:
            if self.config.expandable_segments:
                index = expandable_blocks.best_to_grow(pool, keys, index)
            else:  # switched off since the block was made
                index = expandable_blocks.first_not_expandable(pool, keys, index)
            if index == len(keys):
                return index
            block = pool.free[keys[index] & ADDRESS]
        if size < self._limit <= block.size:
            return len(keys)
        if size >= self._limit and block.size >= size + self.config.max_non_split_rounding:
            return len(keys)
        return index

    def _new_block(self, pool: BlockPool, stream: int, size: int, requested: int) -> Block:
        """Get memory from the device, releasing cached memory if necessary."""
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
            raise SimulatedOutOfMemoryError(requested, self.memory.total - self.memory.used)
        return block

    def _alloc_block(self, pool: BlockPool, stream: int, size: int) -> Block | None:
        wanted = segment_bytes_for_request(size, self.config)
        if self._allowed is not None and self.reserved + wanted > self._allowed:
            return None
        if self.config.throw_on_cudamalloc_oom and wanted > self.memory.total - self.memory.used:
            self.num_oom_rejections += 1
            raise SimulatedOutOfMemoryError(size, self.memory.total - self.memory.used)
        if self.config.expandable_segments:
            block = self._try_allocate_expandable_block(pool, stream, size)
        else:
            block = self._alloc_segment(pool, stream, wanted)
        if block is not None and pool.owner is not None:
            pool.owner.pieces += 1
        return block

    # ---- Free and release ---------------------------------------------------------------------------------

    def _free_block(self, block: Block, kind: int) -> None:
        """Make a block free: the other hot path."""
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
            block.absorb(other)
        other = block.prev
        if other is not None and other.free and other.mapped:
            del keys[bisect_left(keys, other.key)]
            splits -= 1
            bytes_split -= other.size
            other.absorb(block)
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
        """Release one oversize block that is large enough, or several from the largest down."""
        limit = self.config.max_split_size
        if limit is None:
            return False
        wanted = max(size, limit)
        blocks = oversize_blocks(pool, stream, wanted, limit)
        for block in blocks:
            self._release_block(block)
        return sum(block.size for block in blocks) >= wanted

    def _garbage_collect_cached_blocks(self) -> None:
        """Release the oldest whole segments of the large pool, if reserved memory exceeds the threshold."""
        threshold = int(self.config.garbage_collection_threshold * (self._allowed or 0))
        if self.reserved <= threshold:
            return
        for block in garbage_blocks(self.large, self.reserved - threshold):
            self._release_block(block)

    # ---- Streams -------------------------------------------------------------------------------------

    def _process_events(self) -> None:
        """Free the blocks whose other streams are done."""
        if self.captures:
            return
        self.events.insert_deferred()
        for block in self.events.process():
            self._free_block(block, FREE_COMPLETED)

    def _synchronize_and_free_events(self) -> None:
        self.num_sync_all_streams += 1
        self.memory.calls.synchronize += 1
        self.events.insert_deferred()
        self.all_streams_are_done()
        self._process_events()
