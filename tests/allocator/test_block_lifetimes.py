"""The blocks that a walk knows of at some moment; the timeline and fragmentation test the rest."""

from memfit.allocator.block_lifetimes import FREE, LIVE, PENDING, BlockTracker, TrackedBlock
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.initial_state import InitialState
from memfit.records import Action
from support.traces import events_of, freed

MIB = 1 << 20


def walk(*history, conf=""):
    return BlockTracker(events_of(history), AllocatorConfig.of(conf), InitialState())


def test_pieces_are_those_of_the_moment_that_the_walk_is_at():
    steps = walk(
        (Action.SEGMENT_ALLOC, 0, 2 * MIB),
        (Action.ALLOC, 0, 100),
        (Action.ALLOC, 512, MIB),
        *freed(0, 100),
    )
    assert steps.pieces() == []
    steps.to(3)
    rest = TrackedBlock(MIB + 512, 2 * MIB, 0, FREE)
    assert steps.pieces() == [
        TrackedBlock(0, 512, 0, LIVE, 1),
        TrackedBlock(512, MIB + 512, 0, LIVE, 2),
        rest,
    ]
    steps.to(4)
    assert steps.pieces()[0] == TrackedBlock(0, 512, 0, PENDING, 1)
    steps.to(2)  # it has been there
    steps.to(5)
    assert steps.pieces()[0] == TrackedBlock(0, 512, 0, FREE)
    assert steps.freed_by == [-1, 3, 5, -1, -1]
    assert steps.change == [0, 512, MIB, -512, 0]


def test_without_a_cache_there_is_what_is_in_use():
    steps = walk(
        (Action.ALLOC, 0, 100),
        (Action.ALLOC, 512, 7),
        (Action.FREE_REQUESTED, 0, 100),
        conf="backend:cudaMallocAsync",
    )
    steps.to(2)
    assert steps.pieces() == [TrackedBlock(0, 100, 0, LIVE, 0), TrackedBlock(512, 519, 512, LIVE, 1)]
    steps.to(3)
    assert steps.pieces() == [TrackedBlock(512, 519, 512, LIVE, 1)]
