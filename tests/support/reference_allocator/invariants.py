"""The referee: invariants of a caching allocator, each checked the slow way.

    check(allocator)                   between any two operations
    check_choice(allocator, malloc)    after a malloc
    check_refusal(allocator, size)     after a malloc that failed
    check_emptied(allocator)           after empty_cache

Nothing here repeats the allocator's steps: blocks are found by walking from one to the next, sums are
recomputed, and the best block is searched for among all. A violation names its invariant and its place.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from memfit.allocator.block_and_segment_sizes import GRANULE, round_size, segment_bytes_for_request
from memfit.units import MIB
from support.reference_allocator.blocks import SIZE_SHIFT, Block, BlockPool
from support.reference_allocator.caching_allocator import CachingAllocator

_ALIGNMENT = 512


class Invariant(StrEnum):
    """An invariant of the allocator."""

    NO_OVERLAP = "no byte belongs to two blocks"
    TILED = "blocks of one stream and pool fill their segment from end to end"
    ALIGNED = "blocks begin and end at multiples of 512 bytes, and are not empty"
    LISTED_ONCE = "a pool lists each free block once and no other; likewise the first block of each segment"
    IN_ORDER = "a pool sorts its free blocks by stream, size, age of the segment and address"
    COALESCED = "free neighbours are merged, unless only one of them is mapped"
    WAITING = "a block waits for all of its outstanding events, and is free once there are none"
    ALLOCATED_SUM = "allocated is the sum of the allocated blocks"
    RESERVED_SUM = "reserved is the sum of the segments"
    DEVICE_SUM = "the device's bytes in use are the reserved bytes and those taken before"
    ALLOCATED_IS_RESERVED = "allocated is at most reserved"
    WITHIN_FRACTION = "reserved is at most the allowed fraction of the device"
    PIECES = "a private pool counts its segments"
    SERVES = "a block is of the requested stream and pool, and large enough"
    BEST_FIT = "no smaller free block would have fitted, and no older one of that size"
    SPLIT = "the remainder of a block is split off if it is large enough, and only then"
    TRIED_ALL = "an allocation fails only when the cache is released and the device has too little left"
    EMPTIED = "an emptied cache holds nothing that can be released"


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold."""

    rule: Invariant
    where: str


@dataclass(frozen=True, slots=True)
class MallocResult:
    """One malloc, as its caller saw it."""

    block: Block
    size: int
    """Bytes as requested."""
    stream: int
    fresh: bool
    """Whether the allocator got memory from the device (``num_device_alloc`` rose)."""
    retried: bool = False
    """Whether the allocator released its cache first (``num_alloc_retries`` rose)."""


# ---- Between any two operations ----------------------------------------------------------------------


def check(allocator: CachingAllocator, *, taken: int = 0) -> list[Violation]:
    """Check the invariants that hold between two operations.

    Args:
        allocator: any; the fraction that it may reserve was settled before it reserved.
        taken: bytes of the device that were taken before.

    Returns:
        What is broken: nothing, of a sound allocator.
    """
    blocks = _blocks(allocator)
    allocated = sum(block.size for block in blocks if not block.free and not block.waits)
    reserved = sum(block.size for block in blocks if block.mapped)
    found: dict[Invariant, Iterator[str]] = {
        Invariant.NO_OVERLAP: _overlapping(blocks),
        Invariant.TILED: _loose(blocks),
        Invariant.ALIGNED: (_name(b) for b in blocks if b.size <= 0 or (b.size | b.address) % _ALIGNMENT),
        Invariant.LISTED_ONCE: _listed_otherwise(allocator, blocks),
        Invariant.IN_ORDER: _disorder(allocator),
        Invariant.COALESCED: _free_neighbours(blocks),
        Invariant.WAITING: _waiting_otherwise(allocator, blocks),
        Invariant.ALLOCATED_SUM: _unequal(allocator.allocated, allocated),
        Invariant.RESERVED_SUM: _unequal(allocator.reserved, reserved),
        Invariant.DEVICE_SUM: _unequal(allocator.memory.used, taken + _given(blocks)),
        Invariant.ALLOCATED_IS_RESERVED: _beyond(allocator.allocated, allocator.reserved),
        Invariant.WITHIN_FRACTION: _beyond_fraction(allocator, blocks),
        Invariant.PIECES: _miscounted(allocator, blocks),
    }
    return [Violation(rule, where) for rule, places in found.items() for where in places]


def _overlapping(blocks: Sequence[Block]) -> Iterator[str]:
    for block, following in pairwise(blocks):
        if following.address < block.address + block.size:
            yield f"{_name(block)} and {_name(following)}"


def _loose(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        before, following, segment = block.prev, block.next, block.expandable
        if before is not None and before.next is not block:
            yield f"{_name(block)} does not follow {_name(before)}"
        if following is not None:
            same = (following.stream, following.pool, following.expandable)
            if following.prev is not block or following.address != block.address + block.size:
                yield f"{_name(following)} does not follow {_name(block)}"
            elif same != (block.stream, block.pool, segment):
                yield f"{_name(following)} is of another stream, pool or segment than {_name(block)}"
        if segment is not None:
            begin, end = block.address - segment.address, block.address + block.size - segment.address
            if before is None and begin != 0:
                yield f"{_name(block)} is not where its reservation begins"
            if following is None and end != segment.size:
                yield f"{_name(block)} is not where its reservation ends"
            if following is not None and following.mapped != block.mapped and end % segment.handle:
                yield f"{_name(block)} ends within a handle"


def _listed_otherwise(allocator: CachingAllocator, blocks: Sequence[Block]) -> Iterator[str]:
    listed = defaultdict[int, list[tuple[int, str, BlockPool | None]]](list)
    for address, block in allocator.segments.items():
        listed[id(block)].append((address, "first", None))
    for pool in _pools(allocator):
        for address, block in pool.free.items():
            listed[id(block)].append((address, "free", pool))
        for unmapped in pool.unmapped.values():
            for block in unmapped:
                listed[id(block)].append((block.address, "not mapped", pool))
    for block in blocks:
        state = "not mapped" if not block.mapped else "free" if block.free else "in use"
        expected: list[tuple[int, str, BlockPool | None]] = []
        if block.prev is None:
            expected.append((block.address, "first", None))
        if state != "in use":
            expected.append((block.address, state, block.pool))
        if listed[id(block)] != expected or (not block.mapped and not block.free):
            names = ", ".join(place for _, place, _ in listed[id(block)]) or "nowhere"
            yield f"{_name(block)} is {state} and listed {names}"


def _disorder(allocator: CachingAllocator) -> Iterator[str]:
    for pool in _pools(allocator):
        for stream in {*pool.keys, *(block.stream for block in pool.free.values())}:
            free = sorted((b for b in pool.free.values() if b.stream == stream), key=_rank)
            keys = pool.keys.get(stream, [])
            try:
                found = [(id(pool.block(key)), key >> SIZE_SHIFT) for key in keys]
            except KeyError:
                found = []
            if found != [(id(block), block.size) for block in free] or keys != [b.key for b in free]:
                yield f"a {_kind(pool)} pool, stream {stream}: {len(keys)} keys, {len(free)} blocks"


def _free_neighbours(blocks: Sequence[Block]) -> Iterator[str]:
    for block in blocks:
        following = block.next
        if following is not None and block.free and following.free and block.mapped == following.mapped:
            yield f"{_name(block)} and {_name(following)}"


def _waiting_otherwise(allocator: CachingAllocator, blocks: Sequence[Block]) -> Iterator[str]:
    events = Counter(id(event.block) for event in allocator.events.outstanding())
    for block in blocks:
        if block.events != events[id(block)]:
            yield f"{_name(block)} waits for {block.events} of {events[id(block)]} events"
        if block.free and (block.waits or block.uses):
            yield f"{_name(block)} is free, and waits"
        if block.events and not block.waits:
            yield f"{_name(block)} has events, and does not wait"
        if block.waits and not (
            block.events or block.uses
        ):  # uses: freed during a capture, its events come later
            yield f"{_name(block)} waits for nothing"


def _unequal(counted: int, summed: int) -> Iterator[str]:
    if counted != summed:
        yield f"counted {counted:,}, in fact {summed:,}"


def _beyond(less: int, more: int) -> Iterator[str]:
    if less > more:
        yield f"{less:,} beyond {more:,}"


def _beyond_fraction(allocator: CachingAllocator, blocks: Sequence[Block]) -> Iterator[str]:
    # Expandable segments grow by whole handles; PyTorch checks the fraction against less, and may exceed it.
    if allocator._allowed is not None and not any(block.expandable for block in blocks):
        yield from _beyond(allocator.reserved, allocator._allowed)


def _miscounted(allocator: CachingAllocator, blocks: Sequence[Block]) -> Iterator[str]:
    # PyTorch counts each growth and each unmapping of an expandable segment; the two need not balance.
    for pool_id, pool in allocator.pools.items():
        segments = sum(block.prev is None for block in blocks if block.pool.owner is pool)
        if segments != pool.pieces and not allocator.config.expandable_segments:
            yield f"pool {pool_id}: counted {pool.pieces}, in fact {segments}"


# ---- After one operation -----------------------------------------------------------------------------


def check_choice(allocator: CachingAllocator, malloc: MallocResult) -> list[Violation]:
    """Check the block that a malloc has just returned.

    The other blocks are unchanged, and the remainder is just after the returned block: so the state after the
    malloc shows which blocks it chose from.
    """
    found = {
        Invariant.SERVES: _not_as_asked(allocator, malloc),
        Invariant.BEST_FIT: _better(allocator, malloc),
        Invariant.SPLIT: _split_otherwise(allocator, malloc),
    }
    return [Violation(rule, where) for rule, places in found.items() for where in places]


def check_refusal(allocator: CachingAllocator, size: int) -> list[Violation]:
    """Check that the allocation that just failed had to fail.

    Args:
        allocator: outside of captures.
        size: bytes as requested.
    """
    config, memory = allocator.config, allocator.memory
    wanted = segment_bytes_for_request(size, config)
    room = memory.total - memory.used
    if allocator._allowed is not None:
        room = min(room, allocator._allowed - allocator.reserved)
    found = []
    if not config.throw_on_cudamalloc_oom:  # that setting keeps the cache on purpose
        found += [Violation(Invariant.TRIED_ALL, f"{kept} is kept") for kept in _kept(allocator)]
    # Expandable segments need whole handles, and handles mapped for a failing request stay mapped.
    if not config.expandable_segments and wanted <= room // GRANULE * GRANULE:
        found.append(Violation(Invariant.TRIED_ALL, f"{wanted:,} bytes are needed, and {room:,} are left"))
    return found


def check_emptied(allocator: CachingAllocator) -> list[Violation]:
    """Check that the cache was emptied; outside of captures only."""
    return [Violation(Invariant.EMPTIED, f"{kept} is kept") for kept in _kept(allocator)]


def _not_as_asked(allocator: CachingAllocator, malloc: MallocResult) -> Iterator[str]:
    block, rounded = malloc.block, round_size(malloc.size, allocator.config)
    if block.stream != malloc.stream:
        yield f"{_name(block)} is of stream {block.stream}, not of the requested {malloc.stream}"
    if block.pool.small != (rounded <= MIB):
        yield f"{_name(block)} is of a {_kind(block.pool)} pool"
    if block.size < malloc.size:
        yield f"{_name(block)} is too small for {malloc.size:,}"
    if block.free or block.waits or block.requested != malloc.size:
        yield f"{_name(block)} is not noted as serving {malloc.size:,}"


def _better(allocator: CachingAllocator, malloc: MallocResult) -> Iterator[str]:
    block, config = malloc.block, allocator.config
    rest = _rest(block)
    chosen = block.size + (rest.size if rest else 0)
    largest = chosen + _growth(rest or block)
    # Two cases in which PyTorch asks the device although a free block would fit: events that completed while
    # it released its cache freed one, or the best fit can grow but must not be split.
    unseen = malloc.retried or (config.expandable_segments and config.max_split_size is not None)
    rounded = round_size(malloc.size, config)
    for other in block.pool.free.values():
        if other is rest or other.stream != block.stream or not _serves(allocator, other, rounded):
            continue
        if malloc.fresh:
            if not unseen:
                yield f"new memory {_name(block)} for {malloc.size:,}, and {_name(other)} is free"
        # A block that can grow counts with the size it can grow to: one that cannot is preferred.
        elif _rank(other) < (chosen, block.number, block.address) and other.size + _growth(other) <= largest:
            yield f"{_name(block)} of {chosen:,} for {malloc.size:,}, and {_name(other)} is free"


def _serves(allocator: CachingAllocator, block: Block, size: int) -> bool:
    config = allocator.config
    if block.size < size or (block.expandable is not None and not config.expandable_segments):
        return False
    if config.max_split_size is None:
        return True
    if size < config.max_split_size:  # a large block, which is never split, does not serve small requests
        return block.size < config.max_split_size
    return block.size < size + config.max_non_split_rounding


def _split_otherwise(allocator: CachingAllocator, malloc: MallocResult) -> Iterator[str]:
    block, config = malloc.block, allocator.config
    rest = _rest(block)
    size = round_size(malloc.size, config)
    left = rest.size if rest else block.size - size
    if size <= MIB or config.expandable_segments:
        worth = left >= _ALIGNMENT
    else:
        worth = left > MIB and not (config.max_split_size is not None and size >= config.max_split_size)
    if worth != bool(rest) or (rest and block.size != size):
        done = "split off" if rest else "kept"
        yield f"{_name(block)} for {malloc.size:,}: {left:,} bytes are {done}"


def _kept(allocator: CachingAllocator) -> Iterator[str]:
    """Yield what could be released: whole segments, and whole handles of expandable ones."""
    for pool in _pools(allocator):
        if pool.owner is not None and pool.owner.use_count:
            continue
        for block in pool.free.values():
            if block.expandable is None:
                if not block.is_split:
                    yield _name(block)
                continue
            begin = block.address - block.expandable.address
            handle = block.expandable.handle
            if -(-begin // handle) < (begin + block.size) // handle:
                yield _name(block)


# ---- Helpers -----------------------------------------------------------------------------------------


def _pools(allocator: CachingAllocator) -> list[BlockPool]:
    private = [pool for owner in allocator.pools.values() for pool in (owner.small, owner.large)]
    return [allocator.small, allocator.large, *private]


def _blocks(allocator: CachingAllocator) -> list[Block]:
    """Return every reachable block, by address."""
    ahead = list(allocator.segments.values())
    for pool in _pools(allocator):
        ahead += pool.free.values()
        ahead += [block for unmapped in pool.unmapped.values() for block in unmapped]
    found: dict[int, Block] = {}
    while ahead:
        block = ahead.pop()
        if id(block) not in found:
            found[id(block)] = block
            ahead += [beside for beside in (block.prev, block.next) if beside is not None]
    return sorted(found.values(), key=lambda block: block.address)


def _given(blocks: Sequence[Block]) -> int:
    """Return the bytes taken from the device: cudaMalloc takes whole granules."""
    segments: list[int] = []
    mapped = 0
    for block in blocks:
        if block.expandable is not None:
            mapped += block.size if block.mapped else 0
        elif block.prev is None or not segments:
            segments.append(block.size)
        else:
            segments[-1] += block.size
    return mapped + sum(-(-size // GRANULE) * GRANULE for size in segments)


def _rest(block: Block) -> Block | None:
    """Return the remainder split off a block just allocated: before, it had no free neighbour."""
    rest = block.next
    return rest if rest is not None and rest.free and rest.mapped else None


def _growth(block: Block) -> int:
    following = block.next
    return following.size if following is not None and not following.mapped else 0


def _rank(block: Block) -> tuple[int, int, int]:
    return block.size, block.number, block.address


def _kind(pool: BlockPool) -> str:
    return f"{'private ' if pool.owner else ''}{'small' if pool.small else 'large'}"


def _name(block: Block) -> str:
    return f"{block.address:#x}+{block.size:,}"
