"""The data of the HTML page: sums equal those of ``explain``, blocks those of the real allocator."""

import numpy as np
import pytest

from memfit.allocator.block_tracker import FREE, LIVE, BlockTracker
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.reconstruct_initial_state import reconstruct_initial_state
from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import breakdown_at
from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.event_locations import script_location_at
from memfit.records import (
    Action,
    EventLabel,
    GroupBy,
    Mark,
    MarkKind,
    Phase,
    ScriptEnd,
    SnapshotBlock,
)
from memfit.report.html.page_payload import page_payload
from memfit.report.html.page_text_table import PageTextTable
from support.html_reports import GIB, MIB, blocks, run, sums, unpacked
from support.traces import BASE, Event, freed, segment, trace_of


def drawn(trace, most=100_000, *, source=True):
    line = memory_timeline(trace)
    words = PageTextTable(source=source)
    return unpacked(
        page_payload(
            trace, line, attribute_allocations(trace, line), dry_run_of_trace(trace), words, most=most
        ).text
    )


def check_sums(trace, held, moments):
    """Check that layers equal the rows of ``explain`` at some moments, and sum to the allocated bytes."""
    line = memory_timeline(trace)
    attribution = attribute_allocations(trace, line)
    for moment in moments:
        event = int(held.columns["moment.event"][moment])
        explained = breakdown_at(trace, line, attribution, event).rows[GroupBy.CATEGORY]
        rows = {row.name: row.bytes for row in explained if row.bytes}
        assert sums(held, moment) == rows
        assert sum(rows.values()) == line.allocated[event]
        assert held.columns["moment.reserved"][moment] == line.reserved[event]


def test_every_moment_sums_to_the_rows_of_explain():
    trace = run()
    held = drawn(trace)
    check_sums(trace, held, range(len(held.columns["moment.event"])))
    kinds = {"parameters", "buffers", "gradients", "activations", "temporaries", "rounding"}
    assert kinds <= {name for moment in range(30) for name in sums(held, moment)}


@pytest.mark.parametrize("situation", ["several streams", "expandable"])
@pytest.mark.parametrize("late", [False, True])
def test_drawn_blocks_equal_the_real_allocators_pieces(drive, situation, late):
    trace, _, _ = drive(situation, **({"history_from": 700} if late else {}))
    held = drawn(trace)
    events = held.columns["moment.event"]
    moments = np.linspace(0, len(events) - 1, 12).astype(int)
    check_sums(trace, held, moments)
    if late:
        assert held.facts["old"]
    config = AllocatorConfig.read(trace.settings)
    walk = BlockTracker(trace.events, config, reconstruct_initial_state(trace, config))
    boxes, ranges = blocks(held), held.columns
    waited = 0
    for moment in moments:
        walk.advance_to(int(events[moment]) + 1)
        pieces = walk.blocks()
        alive = (boxes.born <= moment) & (moment < boxes.freed)
        assert spans(boxes, alive) == [(p.start, p.stop) for p in pieces if p.state == LIVE]
        waiting = (boxes.freed <= moment) & (moment < boxes.done)
        theirs = [(p.start, p.stop) for p in pieces if p.state not in (LIVE, FREE)]
        # A free that completes at once is drawn as complete at the event that requests it.
        assert set(spans(boxes, waiting)) <= set(theirs)
        assert len(theirs) - waiting.sum() <= 1
        waited += waiting.sum()
        mapped = (ranges["range.born"] <= moment) & (moment < ranges["range.freed"])
        start = ranges["range.address"][mapped]
        assert covered(zip(start, start + ranges["range.size"][mapped], strict=True)) == covered(
            (p.start, p.stop) for p in pieces
        )
    assert waited or situation != "several streams"


def spans(boxes, chosen):
    stop = boxes.address + boxes.requested + boxes.beyond
    return sorted(zip(boxes.address[chosen].tolist(), stop[chosen].tolist(), strict=True))


def covered(ranges):
    """Join ranges that touch."""
    joined = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in ranges):
        if joined and joined[-1][1] == start:
            joined[-1][1] = stop
        else:
            joined.append([start, stop])
    return joined


@pytest.mark.parametrize("most", [0, 1, 5, 12])
def test_blocks_drawn_together_are_counted_in_the_sums(most):
    trace = run()
    held = drawn(trace, most)
    boxes = blocks(held)
    assert len(boxes.born) == most
    assert held.facts["together"] == int((trace.events.action == Action.ALLOC).sum()) - most
    check_sums(trace, held, range(len(held.columns["moment.event"])))
    peak = int(np.argmax(memory_timeline(trace).allocated))
    assert peak in held.columns["moment.event"]
    at_peak = int(np.searchsorted(held.columns["moment.event"], peak))
    alive = ((boxes.born <= at_peak) & (at_peak < boxes.freed)).sum()
    assert alive == min(most, 7)  # blocks alive at the peak come first


def test_a_block_used_by_another_stream_is_freed_later():
    held = drawn(run(steps=1))
    boxes = blocks(held)
    waits = boxes.done - boxes.freed
    repeated = blocks(drawn(run(steps=3)))  # at the same addresses
    assert (repeated.done - repeated.freed).tolist() == [0, 0, *3 * waits[2:].tolist()]
    # The free requested last completes first, at once.
    assert sorted(waits[boxes.layer == "activations"]) == [0, 2, 4, 6]
    assert (waits[boxes.layer == "gradients"] == 0).all()


def test_an_unmap_splits_a_range_in_two():
    history = [
        Event(Action.SEGMENT_MAP, BASE, 60 * MIB),
        Event(Action.SEGMENT_UNMAP, BASE + 20 * MIB, 20 * MIB),
    ]
    at_end = [segment(BASE, 20 * MIB, expandable=True), segment(BASE + 40 * MIB, 20 * MIB, expandable=True)]
    held = drawn(trace_of(history, at_end, settings={"expandable_segments": "True", "conf": ""}))
    columns = held.columns
    rows = zip(
        (columns["range.address"] - BASE) // MIB,
        columns["range.size"] // MIB,
        columns["range.born"],
        columns["range.freed"],
        strict=True,
    )
    assert [tuple(map(int, row)) for row in rows] == [(0, 60, 0, 1), (0, 20, 1, 2), (40, 20, 1, 2)]


def test_a_history_that_starts_late_has_a_layer_for_older_blocks():
    old = SnapshotBlock(BASE, 4 * MIB, 4 * MIB, "active_allocated")
    whole = segment(
        BASE, 20 * MIB, blocks=[old, SnapshotBlock(BASE + 4 * MIB, 16 * MIB, 16 * MIB, "inactive")]
    )
    held = drawn(trace_of([Event(Action.ALLOC, BASE + 4 * MIB, MIB), *freed(BASE + 4 * MIB, MIB)], [whole]))
    assert sums(held, 0) == {"before the history": 4 * MIB, "unknown": MIB}
    assert held.facts["old"] == 1


def test_moments_and_blocks_are_in_the_payload():
    trace = run()
    held = drawn(trace)
    columns = held.columns
    moment = list(columns["moment.event"]).index(4)
    place = columns["moment.place"][moment]
    assert held.facts["phases"][columns["moment.phase"][moment]] == "forward"
    assert columns["moment.step"][moment] == 1
    assert held.words[columns["place.module"][place]] == "blocks.0.fc"
    assert held.words[columns["place.line"][place]] == "~/work/model.py:22"
    gradient = list(blocks(held).layer).index("gradients")
    texts = {
        name: held.words[columns[f"block.{name}"][gradient]]
        for name in ("name", "dtype", "shape", "module", "op")
    }
    assert texts == {
        "name": "weight.grad", "dtype": "float32", "shape": "[1024, 1024]", "module": "blocks.0.fc",
        "op": "AddmmBackward0",
    }  # fmt: skip
    stack = columns["block.stack"][gradient]
    frames = columns["stack.frames"][columns["stack.ends"][stack] : columns["stack.ends"][stack + 1]]
    lines = [held.words[index] for index in frames]
    assert lines == ["~/work/model.py:22  forward", "~/work/train.py:10  main"]


def test_every_moment_has_its_step():
    trace = run(marks=(Mark(0, MarkKind.FORWARD, 0), *run().marks))
    columns = drawn(trace).columns
    steps = [script_location_at(trace, event).step for event in columns["moment.event"].tolist()]
    assert columns["moment.step"].tolist() == steps
    assert set(steps) == {0, 1, 2, 3}


def test_failed_allocations_are_in_the_payload():
    trace = run(steps=1)
    history = [Event(Action.OOM, 1000, 5 * GIB)]
    held = drawn(
        trace_of([Event(Action.SEGMENT_ALLOC, BASE, 20 * MIB), Event(Action.ALLOC, BASE, MIB), *history])
    )
    assert held.facts["failures"] == [{"at": 2, "needed": 5 * GIB, "available": 1000}]
    assert drawn(trace).facts["failures"] == []


def test_older_blocks_are_live_from_the_first_moment():
    """A post-mortem starts with the blocks already there; recording them takes no time."""
    parts = [SnapshotBlock(BASE + 1024 * n, 1024, 600, "active_allocated") for n in range(3)]
    rest = SnapshotBlock(BASE + 3072, 2 * MIB - 3072, 0, "inactive")
    trace = trace_of(
        [
            *[Event(Action.EARLIER, BASE + 1024 * n, 600) for n in range(3)],
            Event(Action.OOM, 0, GIB, label=0),
        ],
        [segment(BASE, 2 * MIB, "small", blocks=[*parts, rest])],
        labels=(EventLabel(Phase.FORWARD, "fc", "", -1),),
        marks=(Mark(3, MarkKind.TRAINING_STEP, 4),),
        end=ScriptEnd("out of memory", 1),
    )
    held = drawn(trace)
    assert held.facts["old"] == 3
    assert held.columns["block.born"].tolist() == [0, 0, 0]
    assert (held.columns["moment.phase"] == tuple(Phase).index(Phase.FORWARD)).all()
    assert held.columns["moment.step"].tolist() == [6] * len(held.columns["moment.step"])
    check_sums(trace, held, range(len(held.columns["moment.event"])))
