"""What reserved bytes are used for, in histories small enough to check by hand."""

import pytest

from memfit.analysis.fragmentation import END, PEAK_ALLOCATED, PEAK_RESERVED, classify_unrequested_bytes
from memfit.errors import FileFormatError, UsageError
from memfit.records import (
    Action,
    Category,
    EventLabel,
    Frame,
    Mark,
    MarkKind,
    Note,
    Phase,
    Provenance,
    ReservedBytes,
    ScriptLocation,
    SnapshotBlock,
)
from support.traces import BASE, Event, freed, segment, trace_of

MIB = 1 << 20
FORWARD, BACKWARD, OPTIMIZER = range(3)
LABELS = (
    EventLabel(Phase.FORWARD, "layers.0", "", -1),
    EventLabel(Phase.BACKWARD, "layers.0", "MmBackward0", -1),
    EventLabel(Phase.OPTIMIZER, "", "", -1),
)
LINES = (3, 5, 7)
"""Lines of the user's file: each is a frame, and the only frame of a stack."""
EXPANDABLE = {"conf": "expandable_segments:True"}


def event(action, address, size, label=FORWARD, line=0, category=Category.UNKNOWN):
    stack = LINES.index(line) if line else -1
    return Event(action, BASE + address, size, label=label, stack=stack, category=category)


def free(address, size, label=FORWARD):
    return freed(BASE + address, size, label=label)


def fragmentation_of(history, segments=None, at=None, **fields):
    """Return the fragmentation of a history at some moments."""
    frames = tuple(Frame("/somewhere/train.py", line, "main", user=True) for line in LINES)
    trace = trace_of(history, segments, labels=LABELS, stacks=((0,), (1,), (2,)), frames=frames, **fields)
    return classify_unrequested_bytes(trace, at)


PINNED = (
    event(Action.SEGMENT_ALLOC, 0, 20 * MIB),
    event(Action.ALLOC, 0, 4 * MIB - 100, line=3),  # 1
    event(Action.ALLOC, 4 * MIB, 8 * MIB, line=5),  # 2: becomes the hole
    event(Action.ALLOC, 12 * MIB, 7 * MIB + 512, BACKWARD, 7, Category.GRADIENT),  # 3: gets all 8 MiB
    *free(4 * MIB, 8 * MIB, BACKWARD),  # 4, 5
    # a step ends here
    *free(12 * MIB, 7 * MIB + 512, OPTIMIZER),  # 6, 7
)
STEP = (Mark(6, MarkKind.TRAINING_STEP, 0),)


def test_a_hole_and_the_blocks_that_pin_it():
    (moment,) = fragmentation_of(PINNED, at={"now": 6}, marks=STEP).moments
    assert moment.small == ReservedBytes()
    assert moment.all == ReservedBytes(
        requested=11 * MIB + 412, rounding=100, unsplit=MIB - 512, holes=8 * MIB
    )
    assert moment.place == ScriptLocation(1, Phase.BACKWARD, "layers.0", "MmBackward0", "")
    (hole,) = moment.holes
    assert (hole.address, hole.size, hole.kind) == (BASE + 4 * MIB, 8 * MIB, "large")
    assert (hole.segment, hole.segment_size, hole.blocks, hole.in_use) == (BASE, 20 * MIB, 2, 12 * MIB)
    assert not hole.expandable
    before, after = hole.pins
    assert (before.address, before.size, before.category) == (BASE, 4 * MIB, "unknown")
    assert before.born == ScriptLocation(1, Phase.FORWARD, "layers.0", "", "/somewhere/train.py:3", "main")
    assert before.freed is None
    assert (after.address, after.size, after.category) == (BASE + 12 * MIB, 8 * MIB, "gradient")
    assert after.born == ScriptLocation(
        1, Phase.BACKWARD, "layers.0", "MmBackward0", "/somewhere/train.py:7", "main"
    )
    assert after.freed == ScriptLocation(2, Phase.OPTIMIZER, "", "", "")


def test_a_block_awaiting_a_stream_pins_holes_and_is_not_one():
    (moment,) = fragmentation_of(PINNED[:7], at={"now": 7}, marks=STEP).moments
    assert moment.all.awaiting_free == 8 * MIB
    assert moment.all.holes == 8 * MIB
    assert [pin.state for pin in moment.holes[0].pins] == ["active_allocated", "active_awaiting_free"]
    assert moment.holes[0].in_use == 12 * MIB
    assert moment.holes[0].pins[1].born.line == "/somewhere/train.py:7"
    assert moment.holes[0].pins[1].freed.phase is Phase.OPTIMIZER


def test_a_wholly_free_segment_is_cached_without_holes():
    history = (*PINNED, *free(0, 4 * MIB - 100))
    end = fragmentation_of(history).moments[-1]
    assert end.all == ReservedBytes(cached=20 * MIB)
    assert end.holes == ()


def test_adjacent_segments_are_separate():
    history = (*PINNED, event(Action.SEGMENT_ALLOC, 20 * MIB, 20 * MIB))
    end = fragmentation_of(history).moments[-1]
    assert (end.all.holes, end.all.cached) == (16 * MIB, 20 * MIB)


def test_the_moments_are_the_peaks_and_the_end():
    assert [(moment.name, moment.events) for moment in fragmentation_of(PINNED).moments] == [
        (PEAK_RESERVED, 2),  # not 1: there the segment is still empty
        (PEAK_ALLOCATED, 4),
        (END, 8),
    ]


def test_a_peak_that_no_allocation_follows():
    history = [event(Action.SEGMENT_ALLOC, 0, 20 * MIB), event(Action.ALLOC, 0, 20 * MIB)]
    history.append(event(Action.SEGMENT_ALLOC, 40 * MIB, 20 * MIB))
    first = fragmentation_of(history).moments[0]
    assert (first.name, first.events, first.all.reserved) == (PEAK_RESERVED, 3, 40 * MIB)


@pytest.mark.parametrize(("size", "kind"), [(MIB, "small"), (MIB + 512, "large")])
def test_mapped_memory_has_the_pool_of_its_blocks(size, kind):
    history = [event(Action.SEGMENT_MAP, 0, 20 * MIB), event(Action.ALLOC, 0, size)]
    mapping = segment(BASE, 20 * MIB, kind, expandable=True)
    end = fragmentation_of(history, [mapping], settings=EXPANDABLE).moments[-1]
    assert getattr(end, kind) == end.all == ReservedBytes(requested=size, holes=20 * MIB - size)
    assert [hole.expandable for hole in end.holes] == [True]


@pytest.mark.parametrize(("mapped", "kind"), [(2 * MIB, "small"), (20 * MIB, "large")])
def test_empty_mapped_memory_has_a_pool(mapped, kind):
    history = [event(Action.SEGMENT_MAP, at, mapped) for at in range(0, 20 * MIB, mapped)]
    mapping = segment(BASE, 20 * MIB, kind, expandable=True)
    end = fragmentation_of(history, [mapping], settings=EXPANDABLE).moments[-1]
    assert getattr(end, kind) == end.all == ReservedBytes(cached=20 * MIB)


@pytest.mark.parametrize("kind", ["small", "large"])
def test_segments_without_a_history_have_a_pool(kind):
    """Memory mapped before the history began has the pool that it has at the end."""
    blocks = (SnapshotBlock(BASE, 20 * MIB, 0, "inactive"),)
    mapping = segment(BASE, 20 * MIB, kind, expandable=True, blocks=blocks)
    for moment in fragmentation_of([], [mapping], settings=EXPANDABLE).moments:
        assert getattr(moment, kind) == moment.all == ReservedBytes(cached=20 * MIB)
        assert moment.place == ScriptLocation(0, Phase.SETUP, "", "", "")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"conf": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ],
)
def test_without_segments_it_does_not_apply(settings, named):
    found = fragmentation_of(PINNED[1:], settings=settings)
    assert found.moments == ()
    assert named in found.not_applicable


def test_figures_have_the_provenance_of_sizes():
    note = Note(Provenance.ASSUMED, "a size", sizes=True)
    assert fragmentation_of(PINNED).provenance is Provenance.EXACT
    assert fragmentation_of(PINNED, notes=(note,)).provenance is Provenance.ASSUMED


@pytest.mark.parametrize("events", [-1, 9])
def test_a_moment_beyond_the_history_is_refused(events):
    with pytest.raises(UsageError, match=f"now: event {events} is out of range. The trace has 8 events"):
        fragmentation_of(PINNED, at={"now": events})


@pytest.mark.parametrize("requested", [-1, 2 * MIB + 1])
def test_a_block_smaller_than_its_request_is_refused(requested):
    blocks = (SnapshotBlock(BASE, 2 * MIB, requested, "active_allocated"),)
    with pytest.raises(FileFormatError, match="were requested"):
        fragmentation_of([], [segment(BASE, 2 * MIB, "small", blocks=blocks)])


def test_rounding_is_capped_by_the_size_of_a_block_older_than_the_setting():
    """A script may set roundup_power2_divisions late: a request of 5 MiB would get 6 MiB now."""
    blocks = (
        SnapshotBlock(BASE, 5 * MIB, 5 * MIB - 1, "active_allocated"),
        SnapshotBlock(BASE + 5 * MIB, 15 * MIB, 0, "inactive"),
    )
    settings = {"conf": "roundup_power2_divisions:2"}
    end = fragmentation_of([], [segment(BASE, 20 * MIB, blocks=blocks)], settings=settings).moments[-1]
    assert end.all == ReservedBytes(requested=5 * MIB - 1, rounding=1, holes=15 * MIB)


def test_overlapping_blocks_are_refused():
    """Memory allocated twice: each event is possible, but their result is not."""
    history = [
        event(Action.SEGMENT_ALLOC, 0, 20 * MIB),
        event(Action.ALLOC, 0, 20 * MIB),
        event(Action.SEGMENT_ALLOC, 0, 20 * MIB),
        event(Action.ALLOC, 0, 20 * MIB),
    ]
    segments = [segment(address, 20 * MIB) for address in (BASE, BASE + 40 * MIB)]
    with pytest.raises(FileFormatError, match="do not add up to the 41,943,040 bytes reserved"):
        fragmentation_of(history, segments)
