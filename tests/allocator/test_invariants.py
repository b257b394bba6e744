"""The allocator's invariants: checked after every operation, and each violated on purpose."""

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from memfit.allocator.config import AllocatorConfig
from support.allocator_comparison.watched import BESIDE, CONFS, EDGES, Watched, run
from support.reference_allocator.caching_allocator import CachingAllocator
from support.reference_allocator.device_memory import DeviceMemory
from support.reference_allocator.invariants import (
    Invariant,
    MallocResult,
    check,
    check_choice,
    check_emptied,
    check_refusal,
)
from support.reference_allocator.stream_events import StreamEvent

MIB, GIB = 1 << 20, 1 << 30
streams = st.integers(0, 2)
sizes = st.one_of(
    st.integers(1, 4096),
    st.integers(1, 300 * MIB),
    st.builds(lambda edge, beside: max(1, edge + beside), st.sampled_from(EDGES), st.sampled_from(BESIDE)),
)


# -- a sound allocator -----------------------------------------------------------------------------


class Operations(RuleBasedStateMachine):
    """Random operations; ``Watched`` raises when one violates an invariant."""

    @initialize(conf=st.sampled_from(CONFS), total=st.sampled_from([700 * MIB, GIB, 4 * GIB]))
    def begin(self, conf, total):
        self.watched = Watched(conf, total)

    @rule(size=sizes, stream=streams)
    def malloc(self, size, stream):
        self.watched.malloc(size, stream)

    @precondition(lambda self: self.watched.live)
    @rule(data=st.data())
    def free(self, data):
        self.watched.free(data.draw(st.integers(0, len(self.watched.live) - 1)))

    @precondition(lambda self: self.watched.live)
    @rule(data=st.data(), stream=streams)
    def record_stream(self, data, stream):
        self.watched.record_stream(data.draw(st.integers(0, len(self.watched.live) - 1)), stream)

    @rule(stream=streams)
    def stream_is_done(self, stream):
        self.watched.stream_is_done(stream)

    @rule()
    def empty_cache(self):
        self.watched.empty_cache()

    @precondition(lambda self: not self.watched.private)
    @rule(capture=st.booleans())
    def begin_private(self, capture):
        self.watched.begin_private(capture=capture)

    @precondition(lambda self: self.watched.private)
    @rule()
    def end_private(self):
        self.watched.end_private()

    @precondition(lambda self: not self.watched.private)
    @rule()
    def release_private(self):
        self.watched.release_private()


TestOperations = Operations.TestCase
TestOperations.settings = settings(
    max_examples=40, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.parametrize("conf", CONFS)
def test_a_long_random_run_violates_no_invariant(conf):
    watched = run(conf, 20261122, 1000)
    assert watched.allocator.num_device_alloc


# -- each invariant, violated ----------------------------------------------------------------------


def allocator_of(conf="", total=GIB):
    """Return an allocator with a small and a large segment, each with a live, a free and a live block."""
    allocator = CachingAllocator(DeviceMemory(total), AllocatorConfig.of(conf))
    for size in (1000, 3 * MIB):
        blocks = [allocator.malloc(size) for _ in range(3)]
        allocator.free(blocks[1])
    assert check(allocator) == []
    return allocator


def first_live(allocator):
    return min(allocator.segments.items())[1]


def broken_by(allocator, **options):
    return {found.rule for found in check(allocator, **options)}


def overlap(allocator):
    first_live(allocator).size += 512


def gap(allocator):
    block = first_live(allocator)
    block.size -= 512
    allocator.allocated -= 512


def wrong_stream(allocator):
    first_live(allocator).stream = 7


def misaligned(allocator):
    block = first_live(allocator)
    block.size -= 1
    block.next.address -= 1


def missing_from_the_segments(allocator):
    del allocator.segments[first_live(allocator).address]


def listed_twice(allocator):
    allocator.small.add(first_live(allocator))


def in_use_and_in_the_pool(allocator):
    next(iter(allocator.small.free.values())).free = False


def resized_in_its_pool(allocator):
    block, other = sorted(allocator.small.free.values(), key=lambda block: block.size)
    block.size, other.size = other.size, block.size


def missing_from_the_free_list(allocator):
    allocator.small.free.popitem()


def not_merged(allocator):
    block = max(allocator.small.free.values(), key=lambda block: block.size)
    allocator.small.remove(block)
    allocator.small.add(block.split(512))
    allocator.small.add(block)


def counted_event_that_does_not_exist(allocator):
    first_live(allocator).events = 1


def waits_without_an_event(allocator):
    block = first_live(allocator)
    block.waits = True
    allocator.allocated -= block.size


def events_of_a_live_block(allocator):
    block = first_live(allocator)
    block.events = 1
    allocator.events.queues[1] = deque([StreamEvent(block)])


def waits_and_is_free(allocator):
    next(iter(allocator.small.free.values())).uses = [1]


def miscounted_allocated(allocator):
    allocator.allocated += 512


def miscounted_reserved(allocator):
    allocator.reserved -= 2 * MIB


def leaked(allocator):
    allocator.memory.malloc(2 * MIB)


def beyond_reserved(allocator):
    allocator.reserved = allocator.allocated - 512


def beyond_allowed(allocator):
    allocator._allowed = allocator.reserved - 1


def miscounted_pieces(allocator):
    allocator.begin_allocate_to_pool((0, 1))
    allocator.malloc(1)
    allocator.pools[0, 1].pieces = 0


@pytest.mark.parametrize(
    ("corrupt", "expected"),
    [
        (overlap, Invariant.NO_OVERLAP),
        (gap, Invariant.TILED),
        (wrong_stream, Invariant.TILED),
        (misaligned, Invariant.ALIGNED),
        (missing_from_the_segments, Invariant.LISTED_ONCE),
        (listed_twice, Invariant.LISTED_ONCE),
        (in_use_and_in_the_pool, Invariant.LISTED_ONCE),
        (resized_in_its_pool, Invariant.IN_ORDER),
        (missing_from_the_free_list, Invariant.IN_ORDER),
        (not_merged, Invariant.COALESCED),
        (counted_event_that_does_not_exist, Invariant.WAITING),
        (waits_without_an_event, Invariant.WAITING),
        (events_of_a_live_block, Invariant.WAITING),
        (waits_and_is_free, Invariant.WAITING),
        (miscounted_allocated, Invariant.ALLOCATED_SUM),
        (miscounted_reserved, Invariant.RESERVED_SUM),
        (leaked, Invariant.DEVICE_SUM),
        (beyond_reserved, Invariant.ALLOCATED_IS_RESERVED),
        (beyond_allowed, Invariant.WITHIN_FRACTION),
        (miscounted_pieces, Invariant.PIECES),
    ],
)
def test_a_corrupted_state_violates_its_invariant(corrupt, expected):
    allocator = allocator_of()
    corrupt(allocator)
    assert expected in broken_by(allocator)


@pytest.mark.parametrize(
    "corrupt", [wrong_stream, miscounted_allocated, not_merged, leaked, beyond_allowed, miscounted_pieces]
)
def test_a_corruption_violates_no_other_invariant(corrupt):
    """Invariants are independent: one mistake violates only its own."""
    allocator = allocator_of()
    corrupt(allocator)
    assert len(broken_by(allocator)) == 1


def test_half_mapped_handles_are_a_violation():
    allocator = allocator_of("expandable_segments:True")
    unmapped = allocator.large.unmapped[0][0]
    unmapped.address += MIB
    unmapped.size -= MIB
    unmapped.prev.size += MIB
    assert Invariant.TILED in broken_by(allocator)


def test_memory_taken_by_others_is_not_counted():
    allocator = CachingAllocator(DeviceMemory(GIB, used=100 * MIB), AllocatorConfig())
    allocator.malloc(1)
    assert check(allocator, taken=100 * MIB) == []
    assert broken_by(allocator) == {Invariant.DEVICE_SUM}


@pytest.mark.parametrize(("changes"), [{"stream": 1}, {"size": 4 * MIB}, {"size": 1}, {}])
def test_a_block_unlike_the_request_is_a_violation(changes):
    allocator = allocator_of()
    block = allocator.malloc(3 * MIB)
    malloc = {"block": block, "size": 3 * MIB, "stream": 0, "fresh": False} | changes
    found = {broken.rule for broken in check_choice(allocator, MallocResult(**malloc))}
    assert Invariant.SERVES in found if changes else found == set()


def test_a_larger_block_than_the_best_fit_is_a_violation():
    allocator = allocator_of()
    small_hole = next(block for block in allocator.large.free.values() if block.size == 3 * MIB)
    allocator.large.remove(small_hole)  # out of sight of the search
    block = allocator.malloc(3 * MIB)
    allocator.large.add(small_hole)
    malloc = MallocResult(block, 3 * MIB, 0, fresh=False)
    assert [found.rule for found in check_choice(allocator, malloc)] == [Invariant.BEST_FIT]


def test_new_memory_despite_a_fitting_free_block_is_a_violation():
    allocator = allocator_of()
    hidden = list(allocator.large.free.values())
    for block in hidden:
        allocator.large.remove(block)
    malloc = MallocResult(allocator.malloc(3 * MIB), 3 * MIB, 0, fresh=True)
    for block in hidden:
        allocator.large.add(block)
    assert {found.rule for found in check_choice(allocator, malloc)} == {Invariant.BEST_FIT}


def test_a_younger_block_of_equal_size_is_a_violation():
    allocator = CachingAllocator(DeviceMemory(GIB), AllocatorConfig())
    blocks = [allocator.malloc(20 * MIB) for _ in range(2)]
    for block in blocks:
        allocator.free(block)
    allocator.large.remove(blocks[0])
    malloc = MallocResult(allocator.malloc(20 * MIB), 20 * MIB, 0, fresh=False)
    allocator.large.add(blocks[0])
    assert {found.rule for found in check_choice(allocator, malloc)} == {Invariant.BEST_FIT}


def test_a_block_left_unsplit_is_a_violation():
    allocator = CachingAllocator(DeviceMemory(GIB), AllocatorConfig())
    block = allocator.malloc(19 * MIB)  # the whole of a new segment of 20 MiB
    assert check_choice(allocator, MallocResult(block, 19 * MIB, 0, fresh=True)) == []
    block.requested = 3 * MIB
    broken = check_choice(allocator, MallocResult(block, 3 * MIB, 0, fresh=True))
    assert [found.rule for found in broken] == [Invariant.SPLIT]


def test_a_remainder_too_small_to_split_is_a_violation():
    allocator = CachingAllocator(DeviceMemory(GIB), AllocatorConfig())
    block = allocator.malloc(9 * MIB)  # 11 MiB of the new segment are split off
    rest = block.next
    allocator.large.remove(rest)
    block.size = block.requested = 19 * MIB
    rest.address, rest.size = block.address + block.size, MIB
    allocator.large.add(rest)
    broken = check_choice(allocator, MallocResult(block, 19 * MIB, 0, fresh=True))
    assert [found.rule for found in broken] == [Invariant.SPLIT]


def test_a_refusal_with_enough_device_memory_is_a_violation():
    allocator = CachingAllocator(DeviceMemory(GIB), AllocatorConfig())
    assert {found.rule for found in check_refusal(allocator, GIB - 2 * MIB)} == {Invariant.TRIED_ALL}
    assert check_refusal(allocator, GIB + 1) == []


def test_a_refusal_with_a_cached_segment_is_a_violation():
    allocator = CachingAllocator(DeviceMemory(GIB), AllocatorConfig())
    allocator.free(allocator.malloc(600 * MIB))
    assert [found.rule for found in check_refusal(allocator, 500 * MIB)] == [Invariant.TRIED_ALL]


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_cache_that_is_not_emptied_is_a_violation(conf):
    allocator = CachingAllocator(DeviceMemory(GIB), AllocatorConfig.of(conf))
    allocator.free(allocator.malloc(1))
    assert [found.rule for found in check_emptied(allocator)] == [Invariant.EMPTIED]
    allocator.empty_cache()
    assert check_emptied(allocator) == []
