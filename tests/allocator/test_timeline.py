"""The timeline equals PyTorch's own figures after every operation, and refuses impossible histories."""

from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memfit.allocator.timeline import memory_timeline, timeline_disagreement_with_pytorch
from memfit.errors import FileFormatError
from memfit.records import Action, Mark, MarkKind, Segment, SnapshotBlock
from support.traces import BASE, freed, segment, trace_of

MIB = 1 << 20
STATES = ("inactive", "active_allocated", "active_awaiting_free")

# -- against the real allocator --------------------------------------------------------------------


def test_the_timeline_is_exact_after_every_operation(drive, situation):
    trace, operations, truth = drive(situation)
    derived = memory_timeline(trace)
    at = np.searchsorted(operations, truth[:, 0], side="right") - 1
    np.testing.assert_array_equal(derived.allocated[at], truth[:, 1])
    np.testing.assert_array_equal(derived.reserved[at], truth[:, 2])
    assert timeline_disagreement_with_pytorch(trace, derived) == ""


def test_the_compared_histories_have_shortages_and_shared_blocks(drive):
    """The comparison above covers only what its histories contain."""
    trace, _, _ = drive("several streams")
    counts = np.bincount(trace.events.action, minlength=len(Action))
    assert trace.statistics["num_alloc_retries"] > 0
    assert counts[Action.OOM] > 0
    assert counts[Action.SEGMENT_FREE] > 0
    requested = np.flatnonzero(trace.events.action == Action.FREE_REQUESTED)
    assert (trace.events.action[requested + 1] != Action.FREE_COMPLETED).any()


# -- small histories by hand -----------------------------------------------------------------------


def block_sizes(*requests, whole=20 * MIB, conf=""):
    """Return the sizes of consecutive blocks that serve ``requests`` in one segment."""
    history, address = [(Action.SEGMENT_ALLOC, BASE, whole)], BASE
    sizes = []
    for request in requests:
        history.append((Action.ALLOC, address, request))
        derived = memory_timeline(trace_of(history, [segment(BASE, whole)], settings={"conf": conf}))
        sizes.append(int(derived.block_size[-1]))
        address += sizes[-1]
    return sizes


EARLIER = segment(
    BASE,
    2 * MIB,
    blocks=[
        SnapshotBlock(BASE, 512, 100, STATES[1]),
        SnapshotBlock(BASE + 512, 2 * MIB - 512, 0, STATES[0]),
    ],
)
"""A segment with a block of 512 bytes that is older than the history."""


def test_allocations_older_than_the_history_do_not_change_the_allocated_bytes():
    rows = [(Action.EARLIER, BASE, 100), (Action.ALLOC, BASE + 512, 100), *freed(BASE + 512, 100)]
    derived = memory_timeline(trace_of(rows, [EARLIER]))
    assert derived.allocated.tolist() == [512, 1024, 512, 512]
    assert derived.block_size.tolist() == [512, 512, 0, 0]
    assert derived.freed_by.tolist() == [4, 2, -1, -1]


@pytest.mark.parametrize(
    "rows",
    [
        [(Action.EARLIER, BASE + 512, 100)],
        [(Action.EARLIER, BASE, 100), (Action.EARLIER, BASE, 100)],
        [(Action.ALLOC, BASE, 100), (Action.EARLIER, BASE, 100)],
    ],
)
def test_earlier_events_need_blocks_at_the_beginning(rows):
    with pytest.raises(FileFormatError, match="refers to a block allocated before"):
        memory_timeline(trace_of(rows, [EARLIER]))


def test_a_large_remainder_is_split_off_beyond_1_mib():
    assert block_sizes(19 * MIB) == [20 * MIB]
    assert block_sizes(19 * MIB - 512) == [19 * MIB - 512]


def test_a_small_remainder_is_split_off_from_512_bytes():
    assert block_sizes(MIB, MIB - 512, 512, whole=2 * MIB) == [MIB, MIB - 512, 512]


def test_the_small_pool_ends_with_1_mib():
    # A request of 1 MiB is served from the small pool, a request of one byte more from the large pool.
    assert block_sizes(MIB, whole=3 * MIB // 2) == [MIB]
    assert block_sizes(MIB + 1, whole=2 * MIB) == [2 * MIB]


def test_no_block_of_max_split_size_is_split():
    assert block_sizes(8 * MIB - 512, conf="max_split_size_mb:8") == [8 * MIB - 512]
    assert block_sizes(8 * MIB, conf="max_split_size_mb:8") == [20 * MIB]


def test_expandable_segments_split_at_512_bytes_in_both_pools():
    assert block_sizes(19 * MIB, 512, conf="expandable_segments:True") == [19 * MIB, 512]


@pytest.mark.parametrize("order", [(0, 20 * MIB), (20 * MIB, 0)])
def test_adjacent_segments_do_not_merge(order):
    size = 20 * MIB
    history = [
        (Action.SEGMENT_ALLOC, BASE, size),
        (Action.SEGMENT_ALLOC, BASE + size, size),
        (Action.ALLOC, BASE, size),
        (Action.ALLOC, BASE + size, size),
        *(event for at in order for event in freed(BASE + at, size)),
        (Action.SEGMENT_FREE, BASE, size),
        (Action.SEGMENT_FREE, BASE + size, size),
    ]
    derived = memory_timeline(trace_of(history))
    assert derived.reserved.tolist() == [size] + [2 * size] * 7 + [size, 0]
    assert derived.allocated.tolist() == [0, 0, size, 2 * size, size, size, 0, 0, 0, 0]
    freed_by = [4, 6] if order[0] == 0 else [6, 4]
    assert derived.freed_by.tolist() == [-1, -1, *freed_by, -1, -1, -1, -1, -1, -1]


def test_allocations_never_freed_are_freed_at_the_end():
    derived = memory_timeline(trace_of([(Action.SEGMENT_ALLOC, BASE, 2 * MIB), (Action.ALLOC, BASE, 1)]))
    assert derived.freed_by.tolist() == [-1, 2]


@pytest.mark.parametrize(
    "settings_", [{"conf": "backend:cudaMallocAsync"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}]
)
def test_without_a_cache_sizes_are_summed(settings_):
    history = [
        (Action.ALLOC, BASE, 100),
        (Action.ALLOC, BASE + 512, 1000),
        *freed(BASE, 100),
        (Action.ALLOC, BASE, 7),
    ]
    derived = memory_timeline(trace_of(history, settings=settings_))
    assert derived.allocated.tolist() == [100, 1100, 1000, 1000, 1007]
    assert derived.reserved.tolist() == derived.allocated.tolist()
    assert derived.block_size.tolist() == [100, 1000, 0, 0, 7]
    assert derived.freed_by.tolist() == [2, 5, -1, -1, 5]
    with pytest.raises(FileFormatError, match="Event 1 of 2"):
        memory_timeline(trace_of([history[0], history[0]], settings=settings_))


def test_an_empty_history_has_an_empty_timeline():
    derived = memory_timeline(trace_of([]))
    assert derived.allocated.tolist() == derived.reserved.tolist() == []


SEGMENT = (Action.SEGMENT_ALLOC, BASE, 2 * MIB)
ALLOC = (Action.ALLOC, BASE, 512)
FREE = (Action.FREE_REQUESTED, BASE, 512)
FREED = (Action.FREE_COMPLETED, BASE, 512)
IMPOSSIBLE = {
    "alloc without a segment": [ALLOC],
    "alloc inside a free block": [SEGMENT, (Action.ALLOC, BASE + 512, 512)],
    "alloc of an allocated block": [SEGMENT, ALLOC, ALLOC],
    "alloc beyond the segment": [SEGMENT, (Action.ALLOC, BASE, 3 * MIB)],
    "free of a free block": [SEGMENT, FREE],
    "free twice": [SEGMENT, ALLOC, FREE, FREE],
    "free never requested": [SEGMENT, ALLOC, FREED],
    "segment twice": [SEGMENT, SEGMENT],
    "segment freed in use": [SEGMENT, ALLOC, (Action.SEGMENT_FREE, BASE, 2 * MIB)],
    "half a segment freed": [SEGMENT, (Action.SEGMENT_FREE, BASE, MIB)],
    "unmapped, never mapped": [SEGMENT, (Action.SEGMENT_UNMAP, BASE, 2 * MIB)],
    "unmapped in use": [
        (Action.SEGMENT_MAP, BASE, 2 * MIB),
        ALLOC,
        (Action.SEGMENT_UNMAP, BASE, 2 * MIB),
    ],
}
CHANGE = {
    Action.SEGMENT_ALLOC: 1,
    Action.SEGMENT_MAP: 1,
    Action.SEGMENT_FREE: -1,
    Action.SEGMENT_UNMAP: -1,
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_history_names_the_event(name):
    history = IMPOSSIBLE[name]
    change = sum(CHANGE.get(action, 0) * size for action, _, size in history)
    # With these segments at the end, the history begins without any.
    trace = trace_of(history, [segment(BASE, change, "small")] if change > 0 else ())
    *_, (action, _, _) = history
    named = rf"Event {len(history) - 1} of {len(history)} \(kind {action.name.lower()}, "
    with pytest.raises(FileFormatError, match=named):
        memory_timeline(trace)


def test_events_that_reserve_more_than_the_end_are_refused():
    with pytest.raises(FileFormatError, match="2,097,152 bytes more than they release"):
        memory_timeline(trace_of([SEGMENT, ALLOC], ()))


def test_settings_that_pytorch_would_refuse_are_refused():
    with pytest.raises(FileFormatError, match="expandable_segments:Perhaps"):
        memory_timeline(trace_of([], settings={"expandable_segments": "Perhaps"}))


# -- forged histories ------------------------------------------------------------------------------

addresses = st.integers(0, 8).map(lambda n: BASE + n * MIB // 2)
extents = st.integers(0, 8).map(lambda n: n * MIB // 2)
actions = st.sampled_from([action for action in Action if action is not Action.OOM])
in_blocks = st.builds(SnapshotBlock, addresses, extents, extents, st.sampled_from(STATES))
at_end = st.builds(
    Segment,
    addresses,
    extents,
    st.just(0),
    st.just("large"),
    st.just((0, 0)),
    expandable=st.booleans(),
    blocks=st.lists(in_blocks, max_size=4).map(tuple),
)


@given(st.lists(st.tuples(actions, addresses, extents), max_size=12), st.lists(at_end, max_size=3))
def test_a_forged_history_is_replayed_or_refused(history, segments_):
    for conf in ("", "expandable_segments:True"):
        with suppress(FileFormatError):
            derived = memory_timeline(trace_of(history, segments_, settings={"conf": conf}))
            assert len(derived.allocated) == len(history)


# -- the referee -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statistics", "words"),
    [
        ({}, ""),
        ({"allocated_bytes.all.current": 512, "reserved_bytes.all.peak": 2 * MIB}, ""),
        (
            {"allocated_bytes.all.current": 1024},
            "counted 1,024 bytes as allocated (current), but its allocator history gives 512",
        ),
        (
            {"allocated_bytes.all.peak": 512},
            "counted 512 bytes as allocated (peak), but its allocator history gives 1,024",
        ),
        ({"reserved_bytes.all.current": 0}, "counted 0 bytes as reserved (current)"),
    ],
)
def test_a_disagreement_with_the_statistics_is_reported(statistics, words):
    history = [SEGMENT, ALLOC, (Action.ALLOC, BASE + 512, 1), (Action.FREE_REQUESTED, BASE + 512, 1)]
    trace = trace_of(history, statistics=statistics)
    found = timeline_disagreement_with_pytorch(trace, memory_timeline(trace))
    assert words in found
    assert bool(found) == bool(words)


def test_the_peak_counts_from_the_last_reset():
    history = [SEGMENT, ALLOC, (Action.ALLOC, BASE + 512, 1), (Action.FREE_REQUESTED, BASE + 512, 1)]
    trace = trace_of(history, statistics={"allocated_bytes.all.peak": 512})
    reset = replace(trace, marks=(Mark(4, MarkKind.RESET_PEAK, 0),))
    assert timeline_disagreement_with_pytorch(reset, memory_timeline(reset)) == ""
