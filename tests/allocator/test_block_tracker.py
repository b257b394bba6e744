"""Blocks that BlockTracker reports at an event; tests of timeline and fragmentation cover the rest."""

from memfit.allocator.block_tracker import FREE, LIVE, PENDING, BlockSnapshot, BlockTracker
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.reconstruct_initial_state import InitialAllocatorState
from memfit.records import Action
from support.traces import events_of, freed

MIB = 1 << 20


def track(*history, conf=""):
    return BlockTracker(events_of(history), AllocatorConfig.of(conf), InitialAllocatorState())


def test_blocks_are_those_of_the_event_the_tracker_has_reached():
    tracker = track(
        (Action.SEGMENT_ALLOC, 0, 2 * MIB),
        (Action.ALLOC, 0, 100),
        (Action.ALLOC, 512, MIB),
        *freed(0, 100),
    )
    assert tracker.blocks() == []
    tracker.advance_to(3)
    rest = BlockSnapshot(MIB + 512, 2 * MIB, 0, FREE)
    assert tracker.blocks() == [
        BlockSnapshot(0, 512, 0, LIVE, 1),
        BlockSnapshot(512, MIB + 512, 0, LIVE, 2),
        rest,
    ]
    tracker.advance_to(4)
    assert tracker.blocks()[0] == BlockSnapshot(0, 512, 0, PENDING, 1)
    tracker.advance_to(2)  # already past it: no effect
    tracker.advance_to(5)
    assert tracker.blocks()[0] == BlockSnapshot(0, 512, 0, FREE)
    assert tracker.freed_by == [-1, 3, 5, -1, -1]
    assert tracker.change == [0, 512, MIB, -512, 0]


def test_without_a_cache_only_blocks_in_use_are_reported():
    tracker = track(
        (Action.ALLOC, 0, 100),
        (Action.ALLOC, 512, 7),
        (Action.FREE_REQUESTED, 0, 100),
        conf="backend:cudaMallocAsync",
    )
    tracker.advance_to(2)
    assert tracker.blocks() == [BlockSnapshot(0, 100, 0, LIVE, 0), BlockSnapshot(512, 519, 512, LIVE, 1)]
    tracker.advance_to(3)
    assert tracker.blocks() == [BlockSnapshot(512, 519, 512, LIVE, 1)]
