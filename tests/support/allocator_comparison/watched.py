"""Random operations on memfit's allocator; the referee checks its invariants after each. No torch needed."""

import random
from types import ModuleType
from typing import TYPE_CHECKING

from memfit.allocator.config import AllocatorConfig
from support.allocator_comparison.sizes import size_of
from support.reference_allocator import caching_allocator as ours
from support.reference_allocator.device_memory import DeviceMemory
from support.reference_allocator.invariants import (
    MallocResult,
    Violation,
    check,
    check_choice,
    check_emptied,
    check_refusal,
)

if TYPE_CHECKING:
    from support.reference_allocator.blocks import Block

MIB = 1 << 20
TAKEN = 300 * MIB
CONFS = (
    "",
    "expandable_segments:True",
    "expandable_segments:True,max_split_size_mb:32",
    "max_split_size_mb:32",
    "max_split_size_mb:64,max_non_split_rounding_mb:100",
    "large_segment_size_mb:12",
    "roundup_power2_divisions:[1:2,8:4,64:8,>:2]",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.8",
    "expandable_segments:True,per_process_memory_fraction:0.7",
    "throw_on_cudamalloc_oom:True",
)
EDGES = (512, MIB, 2 * MIB, 10 * MIB, 12 * MIB, 20 * MIB, 32 * MIB, 64 * MIB)
BESIDE = (-512, -1, 0, 1, 512, MIB, MIB + 512)
_WEIGHTS = {
    "malloc": 53,
    "free": 35,
    "record_stream": 6,
    "stream_is_done": 2,
    "private": 2,
    "empty_cache": 1,
    "release": 1,
}
_WHEN_FULL = (35, 53, *tuple(_WEIGHTS.values())[2:])


class BrokenError(Exception):
    """The allocator violated invariants."""

    def __init__(self, broken: list[Violation]) -> None:
        super().__init__("; ".join(f"{found.rule.name}: {found.where}" for found in broken))
        self.broken = broken


class Watched:
    """An allocator whose every operation the referee checks.

    Args:
        conf: the allocator's settings.
        total: bytes of the device, of which other processes take ``TAKEN``.
        caching: the module that provides the allocator; the mutation tests pass a mutated one.

    Each operation raises BrokenError if an invariant does not hold after it.
    """

    def __init__(self, conf: str, total: int, caching: ModuleType = ours) -> None:
        memory = DeviceMemory(total, used=TAKEN)
        self.allocator = caching.CachingAllocator(memory, AllocatorConfig.of(conf))
        self.live: list[Block] = []
        self.private = False
        """Whether allocations use a private pool."""
        self._pool_id = 0, 1
        self._out_of_memory = caching.SimulatedOutOfMemoryError

    def malloc(self, size: int, stream: int) -> None:
        """Allocate a block; running out of memory is allowed."""
        allocator = self.allocator
        device_allocs, retries = allocator.num_device_alloc, allocator.num_alloc_retries
        try:
            block = allocator.malloc(size, stream)
        except self._out_of_memory:
            self._check([] if allocator.captures else check_refusal(allocator, size))
            return
        self.live.append(block)
        fresh, retried = allocator.num_device_alloc != device_allocs, allocator.num_alloc_retries != retries
        self._check(check_choice(allocator, MallocResult(block, size, stream, fresh, retried)))

    def free(self, index: int) -> None:
        """Free one of the live blocks."""
        self.allocator.free(self.live.pop(index))
        self._check()

    def record_stream(self, index: int, stream: int) -> None:
        """Record a use of one of the live blocks on a stream."""
        self.allocator.record_stream(self.live[index], stream)
        self._check()

    def stream_is_done(self, stream: int) -> None:
        """Complete the work of a stream."""
        self.allocator.stream_is_done(stream)
        self._check()

    def empty_cache(self) -> None:
        """Empty the cache."""
        self.allocator.empty_cache()
        self._check([] if self.allocator.captures else check_emptied(self.allocator))

    def begin_private(self, *, capture: bool) -> None:
        """Allocate from a private pool from now on, as a capture or a ``MemPool`` does."""
        self.allocator.begin_allocate_to_pool(self._pool_id)
        self.allocator.captures += capture
        self.private = True

    def end_private(self) -> None:
        """Stop allocating from a private pool."""
        self.allocator.captures = 0
        self.allocator.end_allocate_to_pool(self._pool_id)
        self.private = False

    def release_private(self) -> None:
        """Delete the graphs or the ``MemPool`` of a pool, after which nothing uses that pool.

        Does nothing for expandable segments. PyTorch counts their growths and unmappings, whose numbers may
        differ, and drops a released pool at a count of 0 although the pool may still hold memory.
        """
        pool = self.allocator.pools.get(self._pool_id)
        if pool is not None and not self.allocator.config.expandable_segments:
            for _ in range(pool.use_count):
                self.allocator.release_pool(self._pool_id)
            self._pool_id = 0, self._pool_id[1] + 1
        self._check()

    def _check(self, found: list[Violation] | None = None) -> None:
        broken = (found or []) + check(self.allocator, taken=TAKEN)
        if broken:
            raise BrokenError(broken)


def run(conf: str, seed: int, operations: int, caching: ModuleType = ours) -> Watched:
    """Perform random operations on a small device that is mostly full.

    Raises:
        BrokenError: an invariant is violated.
    """
    dice = random.Random(seed)  # noqa: S311 - nothing secret
    watched = Watched(conf, dice.choice((700, 1024, 4096, 16384)) * MIB, caching)
    room = 0.55 * (watched.allocator.memory.total - TAKEN)
    for _ in range(operations):
        full = watched.allocator.allocated > room
        (kind,) = dice.choices(tuple(_WEIGHTS), _WHEN_FULL if full else tuple(_WEIGHTS.values()))
        _do(kind, watched, dice)
    return watched


def _do(kind: str, watched: Watched, dice: random.Random) -> None:
    if kind == "malloc":
        watched.malloc(random_size(dice), dice.choice((0, 0, 0, 1, 2)))
    elif kind == "free" and watched.live:
        watched.free(dice.randrange(len(watched.live)))
    elif kind == "record_stream" and watched.live:
        watched.record_stream(dice.randrange(len(watched.live)), dice.randrange(3))
    elif kind == "stream_is_done":
        watched.stream_is_done(dice.randrange(3))
    elif kind == "empty_cache":
        watched.empty_cache()
    elif kind == "private" and watched.private:
        watched.end_private()
    elif kind == "private":
        watched.begin_private(capture=dice.choice((False, True)))
    elif kind == "release" and not watched.private:
        watched.release_private()


def random_size(dice: random.Random) -> int:
    """Return a request size in bytes: any size, or one next to a threshold."""
    kind = dice.choice(("small", "middle", "large", "edge"))
    return size_of(kind, dice, largest=120 * MIB, edges=EDGES, beside=BESIDE)
