"""What reserved bytes are used for: against PyTorch's own snapshot, against a replay, and by hand."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.replay import replay
from memfit.allocator.requests import Ask, Requests, requests
from memfit.allocator.timeline import timeline
from memfit.capture.history import columns
from memfit.errors import FileFormatError, UsageError
from memfit.explain.fragmentation import END, HOLES, PEAK_ALLOCATED, PEAK_RESERVED, fragmentation
from memfit.explain.reserved import Reserved
from memfit.records import (
    Action,
    Block,
    Category,
    DeviceUse,
    Figure,
    Label,
    Mark,
    MarkKind,
    Note,
    Phase,
    Place,
    Provenance,
    ScriptEnd,
    Segment,
    Trace,
)

MIB = 1 << 20
BASE = 0x7F00_0000_0000
UNREPLAYED = {"private pools", "captured graphs", "captured graphs, expandable"}


# -- referees ----------------------------------------------------------------------------------------


def told_apart(segments):
    """Do naively what is tested: (requested, beyond, awaiting, holes, cached) of each pool; all holes."""
    rows, holes = {"small": Counter(), "large": Counter()}, Counter()
    for segment in segments:
        row = rows[segment.kind]
        in_use = any(block.state != "inactive" for block in segment.blocks)
        for block in segment.blocks:
            if block.state == "active_allocated":
                row["requested"] += block.requested
                row["beyond"] += block.size - block.requested
            elif block.state == "active_awaiting_free":
                row["awaiting"] += block.size
            elif in_use:
                row["holes"] += block.size
                holes[block.size] += 1
            else:
                row["cached"] += block.size
    names = ("requested", "beyond", "awaiting", "holes", "cached")
    return {kind: tuple(row[name] for name in names) for kind, row in rows.items()}, holes


def rows_until(trace, events, *more):
    history = trace.events
    columns_ = (history.action, history.address, history.size, *more)
    return zip(*(column[:events].tolist() for column in columns_), strict=True)


def mapped_after(trace, events):
    """Return (start, stop, whether of the small pool) of each segment."""
    whole, pages = {}, {}
    for action, address, size in rows_until(trace, events):
        within = range(address, address + size, 2 * MIB)
        if action == Action.SEGMENT_ALLOC:
            whole[address] = size
        elif action == Action.SEGMENT_FREE:
            del whole[address]
        elif action == Action.SEGMENT_MAP:
            pages |= dict.fromkeys(within, size == 2 * MIB)
        elif action == Action.SEGMENT_UNMAP:
            pages = {page: small for page, small in pages.items() if page not in within}
    ranges = [(start, start + size, size == 2 * MIB) for start, size in whole.items()]
    for page in sorted(pages):
        start = ranges.pop()[0] if page - 2 * MIB in pages else page
        ranges.append((start, page + 2 * MIB, pages[page]))
    return ranges


def in_use_after(trace, events):
    """Return the blocks in use, by address; their sizes are the timeline's."""
    blocks = {}
    for action, address, requested, size in rows_until(trace, events, timeline(trace).block_size):
        if action == Action.ALLOC:
            blocks[address] = Block(address, size, requested, "active_allocated")
        elif action == Action.FREE_REQUESTED:
            blocks[address] = replace(blocks[address], state="active_awaiting_free")
        elif action == Action.FREE_COMPLETED:
            del blocks[address]
    return blocks


def added_up(trace, events):
    """Put the segments of a moment together from the history: what is not in use is free."""
    used = sorted(in_use_after(trace, events).items())
    for start, stop, small in mapped_after(trace, events):
        blocks, at = [], start
        for address, block in used:
            if start <= address < stop:
                blocks += [Block(at, address - at, 0, "inactive")] * (at < address) + [block]
                at = address + block.size
        blocks += [Block(at, stop - at, 0, "inactive")] * (at < stop)
        kind = "small" if small else "large"
        yield Segment(start, stop - start, 0, kind, (0, 0), expandable=False, blocks=tuple(blocks))


def rows_of(split):
    return (split.requested, split.rounding + split.unsplit, split.awaiting_free, split.holes, split.cached)


def agree(moment, segments):
    rows, holes = told_apart(segments)
    assert {"small": rows_of(moment.small), "large": rows_of(moment.large)} == rows
    largest = sorted(holes.elements(), reverse=True)[:HOLES]
    assert [hole.size for hole in moment.holes] == largest


# -- against the real allocator ----------------------------------------------------------------------


def test_the_end_is_what_pytorch_says(drive, situation):
    trace, _, _ = drive(situation)
    found = fragmentation(trace)
    end = found.moments[-1]
    assert (end.name, found.provenance) == (END, Provenance.EXACT)
    agree(end, trace.segments)
    statistics = trace.statistics
    for pool, split in (("all", end.all), ("small_pool", end.small), ("large_pool", end.large)):
        awaiting = sum(
            block.requested
            for segment in trace.segments
            for block in segment.blocks
            if block.state == "active_awaiting_free" and pool in ("all", f"{segment.kind}_pool")
        )
        counted = {
            name: statistics[f"{name}_bytes.{pool}.current"]
            for name in ("requested", "allocated", "reserved")
        }
        told = {
            "requested": split.requested + awaiting,
            "allocated": split.allocated,
            "reserved": split.reserved,
        }
        assert told == counted


def test_the_peaks_are_pytorchs(drive, situation):
    trace, _, _ = drive(situation)
    peaks = {moment.name: moment.all for moment in fragmentation(trace).moments}
    assert peaks[PEAK_RESERVED].reserved == trace.statistics["reserved_bytes.all.peak"]
    assert peaks[PEAK_ALLOCATED].allocated == trace.statistics["allocated_bytes.all.peak"]


def test_any_moment_is_what_its_columns_add_up_to(drive, situation):
    trace, _, _ = drive(situation)
    seed = random.SystemRandom().randrange(1 << 30)
    dice = random.Random(seed)  # noqa: S311
    at = {f"seed {seed}, {n}": dice.randint(1, len(trace.events)) for n in range(15)}
    for moment in fragmentation(trace, at).moments:
        agree(moment, added_up(trace, moment.events))


def test_any_moment_is_what_a_replay_has(drive, situation):
    """Up to where memory is first short: a replay needs the device's size, which a snapshot does not hold."""
    trace, _, _ = drive(situation)
    if situation in UNREPLAYED:
        with pytest.raises(FileFormatError, match="private pools"):
            requests(trace)
        return
    seed = random.SystemRandom().randrange(1 << 30)
    asked = requests(trace)
    short = np.isin(trace.events.action, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP, Action.OOM))
    until = int(np.argmax(short)) if short.any() else len(trace.events)
    mallocs = [
        index for index, ask in enumerate(asked.ask) if ask == Ask.MALLOC and asked.event[index] < until
    ]
    assert len(mallocs) > 50
    for index in random.Random(seed).sample(mallocs, 10):  # noqa: S311
        columns_ = (asked.ask, asked.block, asked.size, asked.stream, asked.event)
        first = Requests(*(column[: index + 1] for column in columns_))
        again = replay(first, AllocatorConfig.read(trace.settings), total=80 << 30)
        (moment,) = fragmentation(trace, {f"seed {seed}": asked.event[index] + 1}).moments
        agree(moment, again.segments)


@pytest.mark.parametrize("situation", ["several streams", "expandable", "max_split_size"])
def test_a_history_that_begins_late_tells_as_much(drive, situation):
    whole, _, _ = drive(situation)
    trace, _, _ = drive(situation, history_from=700)
    missing = len(whole.events) - len(trace.events)
    at = {str(count): count for count in (0, 1, *range(50, len(trace.events), 150), len(trace.events))}
    known = fragmentation(whole, {name: missing + count for name, count in at.items()})
    found = fragmentation(trace, at)
    assert missing > 500
    assert found.provenance is (Provenance.EXACT if situation == "expandable" else Provenance.ASSUMED)
    for moment, truth in zip(found.moments, known.moments, strict=True):
        for split, exact in ((moment.small, truth.small), (moment.large, truth.large)):
            if situation == "expandable":
                assert split == exact
            assert split.reserved == exact.reserved
            assert split.requested == exact.requested
            assert split.rounding == exact.rounding
            assert split.awaiting_free == exact.awaiting_free
            # An old block may have had a remainder that is not known and seems to be a hole.
            seems_free = split.holes + split.cached - exact.holes - exact.cached
            assert 0 <= exact.unsplit - split.unsplit == seems_free
    pins = [pin for moment in found.moments for hole in moment.holes for pin in hole.pins]
    assert any(pin.born is None and pin.freed is not None for pin in pins)
    assert any(pin.born is not None for pin in pins)
    agree(found.moments[-1], trace.segments)


# -- by hand -----------------------------------------------------------------------------------------

FORWARD, BACKWARD, OPTIMIZER = range(3)
LABELS = (
    Label(Phase.FORWARD, "layers.0", "", -1),
    Label(Phase.BACKWARD, "layers.0", "MmBackward0", -1),
    Label(Phase.OPTIMIZER, "", "", -1),
)


def event(action, address, size, label=FORWARD, line=0):
    frames = [{"filename": "/somewhere/train.py", "line": line, "name": "main"}] if line else []
    return {
        "action": action,
        "addr": BASE + address,
        "size": size,
        "stream": 0,
        "time_us": 0,
        "user_metadata": str(label),
        "frames": frames,
    }


def freed(address, size, label=FORWARD):
    return [event(action, address, size, label) for action in ("free_requested", "free_completed")]


def trace_of(history, marks=(), segments=(), settings=None, notes=(), categories=()):
    events, stacks, frames = columns(history, label_of=int, is_user_file=lambda _file: True)
    for position, category in categories:
        events.category[position] = category
    nowhere = DeviceUse("none", Figure(0, Provenance.ASSUMED), Figure(0, Provenance.ASSUMED), 0)
    end = ScriptEnd("end", 0)
    return Trace(
        events, LABELS, stacks, frames, marks, segments, nowhere, end, settings or {}, {}, {}, (), notes
    )


LARGE = Segment(BASE, 20 * MIB, 0, "large", (0, 0), expandable=False, blocks=())
PINNED = (
    event("segment_alloc", 0, 20 * MIB),
    event("alloc", 0, 4 * MIB - 100, line=3),  # 1
    event("alloc", 4 * MIB, 8 * MIB, line=5),  # 2: the hole to be
    event("alloc", 12 * MIB, 7 * MIB + 512, BACKWARD, line=7),  # 3: gets 8 MiB, all there is
    *freed(4 * MIB, 8 * MIB, BACKWARD),  # 4, 5
    # a step ends here
    *freed(12 * MIB, 7 * MIB + 512, OPTIMIZER),  # 6, 7
)
STEP = (Mark(6, MarkKind.TRAINING_STEP, 0),)


def test_a_hole_and_the_blocks_that_pin_it():
    trace = trace_of(PINNED, STEP, (LARGE,), categories=[(3, Category.GRADIENT)])
    (moment,) = fragmentation(trace, {"now": 6}).moments
    assert moment.small == Reserved.of()
    assert moment.all == Reserved.of(requested=11 * MIB + 412, rounding=100, unsplit=MIB - 512, holes=8 * MIB)
    assert moment.place == Place(1, Phase.BACKWARD, "layers.0", "MmBackward0", "")
    (hole,) = moment.holes
    assert (hole.address, hole.size, hole.kind) == (BASE + 4 * MIB, 8 * MIB, "large")
    assert (hole.segment, hole.segment_size, hole.blocks, hole.in_use) == (BASE, 20 * MIB, 2, 12 * MIB)
    assert not hole.expandable
    before, after = hole.pins
    assert (before.address, before.size, before.category) == (BASE, 4 * MIB, "rest")
    assert before.born == Place(1, Phase.FORWARD, "layers.0", "", "/somewhere/train.py:3")
    assert before.freed is None
    assert (after.address, after.size, after.category) == (BASE + 12 * MIB, 8 * MIB, "gradient")
    assert after.born == Place(1, Phase.BACKWARD, "layers.0", "MmBackward0", "/somewhere/train.py:7")
    assert after.freed == Place(2, Phase.OPTIMIZER, "", "", "")


def test_a_block_that_waits_for_a_stream_is_no_hole_and_pins():
    (moment,) = fragmentation(trace_of(PINNED[:7], STEP, (LARGE,)), {"now": 7}).moments
    assert moment.all.awaiting_free == 8 * MIB
    assert moment.all.holes == 8 * MIB
    assert [pin.state for pin in moment.holes[0].pins] == ["active_allocated", "active_awaiting_free"]
    assert moment.holes[0].in_use == 12 * MIB
    assert moment.holes[0].pins[1].born.line == "/somewhere/train.py:7"
    assert moment.holes[0].pins[1].freed.phase is Phase.OPTIMIZER


def test_a_segment_that_is_wholly_free_is_cached_and_has_no_hole():
    history = (*PINNED, *freed(0, 4 * MIB - 100))
    end = fragmentation(trace_of(history, STEP, (LARGE,))).moments[-1]
    assert end.all == Reserved.of(cached=20 * MIB)
    assert end.holes == ()


def test_segments_that_touch_are_not_one():
    history = (*PINNED, event("segment_alloc", 20 * MIB, 20 * MIB))
    segments = (LARGE, replace(LARGE, address=BASE + 20 * MIB))
    end = fragmentation(trace_of(history, STEP, segments)).moments[-1]
    assert (end.all.holes, end.all.cached) == (16 * MIB, 20 * MIB)


def test_the_moments_are_the_peaks_and_the_end():
    trace = trace_of(PINNED, STEP, (LARGE,))
    assert [(moment.name, moment.events) for moment in fragmentation(trace).moments] == [
        (PEAK_RESERVED, 2),  # not 1: there the segment is still empty
        (PEAK_ALLOCATED, 4),
        (END, 8),
    ]


def test_a_peak_that_no_allocation_follows():
    history = [event("segment_alloc", 0, 20 * MIB), event("alloc", 0, 20 * MIB)]
    history.append(event("segment_alloc", 40 * MIB, 20 * MIB))
    segments = (LARGE, replace(LARGE, address=BASE + 40 * MIB))
    first = fragmentation(trace_of(history, (), segments)).moments[0]
    assert (first.name, first.events, first.all.reserved) == (PEAK_RESERVED, 3, 40 * MIB)


@pytest.mark.parametrize(("size", "kind"), [(MIB, "small"), (MIB + 512, "large")])
def test_mapped_memory_has_the_pool_of_what_is_in_it(size, kind):
    history = [event("segment_map", 0, 20 * MIB), event("alloc", 0, size)]
    segment = Segment(BASE, 20 * MIB, 0, kind, (0, 0), expandable=True, blocks=())
    settings = {"conf": "expandable_segments:True"}
    end = fragmentation(trace_of(history, (), (segment,), settings)).moments[-1]
    assert getattr(end, kind) == end.all == Reserved.of(requested=size, holes=20 * MIB - size)
    assert [hole.expandable for hole in end.holes] == [True]


@pytest.mark.parametrize(("mapped", "kind"), [(2 * MIB, "small"), (20 * MIB, "large")])
def test_mapped_memory_with_nothing_in_it_has_a_pool(mapped, kind):
    history = [event("segment_map", at, mapped) for at in range(0, 20 * MIB, mapped)]
    segment = Segment(BASE, 20 * MIB, 0, kind, (0, 0), expandable=True, blocks=())
    settings = {"conf": "expandable_segments:True"}
    end = fragmentation(trace_of(history, (), (segment,), settings)).moments[-1]
    assert getattr(end, kind) == end.all == Reserved.of(cached=20 * MIB)


@pytest.mark.parametrize("kind", ["small", "large"])
def test_segments_without_a_history_are_told_apart(kind):
    """What was mapped before the history has the pool that it has at the end."""
    blocks = (Block(BASE, 20 * MIB, 0, "inactive"),)
    segment = Segment(BASE, 20 * MIB, 0, kind, (0, 0), expandable=True, blocks=blocks)
    found = fragmentation(trace_of([], (), (segment,), {"conf": "expandable_segments:True"}))
    for moment in found.moments:
        assert getattr(moment, kind) == moment.all == Reserved.of(cached=20 * MIB)
        assert moment.place == Place(0, Phase.SETUP, "", "", "")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"conf": "backend:cudaMallocAsync"}, "backend:cudaMallocAsync"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    ],
)
def test_without_segments_it_does_not_apply(settings, named):
    found = fragmentation(trace_of(PINNED[1:], settings=settings))
    assert found.moments == ()
    assert named in found.not_applicable


def test_figures_are_as_sure_as_sizes():
    note = Note(Provenance.ASSUMED, "a size", sizes=True)
    assert fragmentation(trace_of(PINNED, (), (LARGE,))).provenance is Provenance.EXACT
    assert fragmentation(trace_of(PINNED, (), (LARGE,), notes=(note,))).provenance is Provenance.ASSUMED


@pytest.mark.parametrize("events", [-1, 9])
def test_there_is_no_such_moment(events):
    with pytest.raises(UsageError, match=f"now: there are 0 to 8 events.*not {events}"):
        fragmentation(trace_of(PINNED, (), (LARGE,)), {"now": events})


@pytest.mark.parametrize("requested", [-1, 2 * MIB + 1])
def test_a_block_that_has_not_what_was_asked_for(requested):
    blocks = (Block(BASE, 2 * MIB, requested, "active_allocated"),)
    segment = Segment(BASE, 2 * MIB, 0, "small", (0, 0), expandable=False, blocks=blocks)
    with pytest.raises(FileFormatError, match="were asked for"):
        fragmentation(trace_of([], (), (segment,)))


def test_a_block_made_before_rounding_was_set_has_no_more_rounding_than_bytes():
    """A script may set roundup_power2_divisions late: a request of 5 MiB would get 6 MiB now."""
    blocks = (
        Block(BASE, 5 * MIB, 5 * MIB - 1, "active_allocated"),
        Block(BASE + 5 * MIB, 15 * MIB, 0, "inactive"),
    )
    segment = replace(LARGE, blocks=blocks)
    settings = {"conf": "roundup_power2_divisions:2"}
    end = fragmentation(trace_of([], (), (segment,), settings)).moments[-1]
    assert end.all == Reserved.of(requested=5 * MIB - 1, rounding=1, holes=15 * MIB)


def test_blocks_that_lie_on_one_another():
    """Memory that is handed out twice: each event is possible, and what they leave is not."""
    history = [
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 0, 20 * MIB),
        event("segment_alloc", 0, 20 * MIB),
        event("alloc", 0, 20 * MIB),
    ]
    segments = (LARGE, replace(LARGE, address=BASE + 40 * MIB))
    with pytest.raises(FileFormatError, match="do not fill the 41,943,040 bytes reserved"):
        fragmentation(trace_of(history, (), segments))
