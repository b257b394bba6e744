"""The state before a history that begins late, checked against PyTorch's figures and by hand."""

import numpy as np
import pytest

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.reconstruct_initial_state import reconstruct_initial_state
from memfit.allocator.timeline import memory_timeline
from memfit.errors import FileFormatError
from memfit.records import Action, SnapshotBlock
from support.traces import BASE, freed, segment, trace_of

MIB = 1 << 20


# -- against the real allocator --------------------------------------------------------------------


@pytest.mark.parametrize("situation", ["several streams", "expandable", "max_split_size"])
def test_a_late_history_gives_the_same_timeline(drive, situation):
    late = 700
    trace, operations, truth = drive(situation, history_from=late)
    start = reconstruct_initial_state(trace, AllocatorConfig.read(trace.settings))
    _, allocated, reserved = truth[late - 1]
    assert start.reserved == reserved
    assert 0 <= allocated - start.allocated <= start.uncertain
    derived = memory_timeline(trace)
    truth = truth[late:]
    at = np.searchsorted(operations, truth[:, 0], side="right") - 1
    truth, at = truth[at >= 0], at[at >= 0]
    short = truth[:, 1] - derived.allocated[at]
    np.testing.assert_array_equal(derived.reserved[at], truth[:, 2])
    assert short.min() >= 0
    assert short.max() <= start.uncertain
    assert short[-1] == 0
    if situation == "expandable":
        assert start.uncertain == 0


# -- late histories by hand ------------------------------------------------------------------------


def late(history, *segment_addresses, size=20 * MIB, state="inactive"):
    """Return the timeline of a history that ends with segments of one block each, and its initial state."""
    at_end = [
        segment(address, size, blocks=[SnapshotBlock(address, size, size, state)])
        for address in segment_addresses
    ]
    trace = trace_of(history, at_end)
    return memory_timeline(trace), reconstruct_initial_state(trace, AllocatorConfig())


def test_an_earlier_block_is_assumed_to_have_its_rounded_size():
    derived, start = late(freed(BASE, 2 * MIB - 1), BASE)
    assert (start.allocated, start.reserved, start.uncertain) == (2 * MIB, 20 * MIB, MIB)
    assert derived.allocated.tolist() == [0, 0]
    assert derived.reserved.tolist() == [20 * MIB, 20 * MIB]


def test_an_earlier_block_keeps_a_remainder_too_small_to_split():
    _, start = late(freed(BASE, 19 * MIB), BASE)
    assert (start.allocated, start.uncertain) == (20 * MIB, 0)


def test_an_earlier_block_extends_to_the_start_of_the_next():
    """Its 2 MiB were in a block of 2.5 MiB, whose remainder was too small to split off."""
    beside = BASE + 5 * MIB // 2
    history = [(Action.ALLOC, beside, 2 * MIB), *freed(beside, 2 * MIB), *freed(BASE, 2 * MIB)]
    derived, start = late(history, BASE)
    assert (start.allocated, start.uncertain) == (5 * MIB // 2, 0)
    assert derived.allocated.tolist() == [9 * MIB // 2, 5 * MIB // 2, 5 * MIB // 2, 0, 0]


def test_an_allocation_settles_the_size_of_the_block_before_it():
    history = [*freed(BASE, 20 * MIB), (Action.ALLOC, BASE, 2 * MIB), *freed(BASE, 2 * MIB)]
    _, start = late(history, BASE)
    assert (start.allocated, start.uncertain) == (20 * MIB, 0)


@pytest.mark.parametrize("at", [0, 20 * MIB])
def test_adjacent_earlier_segments_do_not_merge(at):
    history = [(Action.ALLOC, BASE + at, 39 * MIB // 2), *freed(BASE + at, 39 * MIB // 2)]
    derived, _ = late(history, BASE, BASE + 20 * MIB)
    assert derived.block_size.tolist() == [20 * MIB, 0, 0]


def test_a_late_history_that_contradicts_its_end_is_refused():
    with pytest.raises(FileFormatError, match=r"Event 1 of 2 \(kind free_completed, "):
        late(freed(BASE, 512), BASE, state="active_allocated")


def test_overlapping_segments_at_the_end_are_refused():
    with pytest.raises(FileFormatError, match="overlaps another"):
        late(freed(BASE, 512), BASE, BASE + MIB)
