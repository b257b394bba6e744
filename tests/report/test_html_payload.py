"""The data of the HTML page: sums equal those of ``explain``, blocks those of the real allocator."""

import numpy as np
import pytest

from memfit.allocator.block_lifetimes import FREE, LIVE, BlockTracker
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.initial_state import initial_state
from memfit.allocator.timeline import timeline
from memfit.analysis.attribution import attribute
from memfit.analysis.breakdown import breakdown_at
from memfit.analysis.location import location_at
from memfit.analysis.summary import summarize
from memfit.records import (
    Action,
    GroupBy,
    Label,
    Mark,
    MarkKind,
    Phase,
    ScriptEnd,
    SnapshotBlock,
)
from memfit.report.html.payload import payload
from memfit.report.html.texts import PageTexts
from support.html_reports import GIB, MIB, blocks, run, sums, unpacked
from support.traces import BASE, Event, freed, segment, trace_of


def drawn(trace, most=100_000, *, source=True):
    line = timeline(trace)
    words = PageTexts(source=source)
    return unpacked(payload(trace, line, attribute(trace, line), summarize(trace), words, most=most).text)


def check_sums(trace, held, moments):
    """Check that layers equal the rows of ``explain`` at some moments, and sum to what is allocated."""
    line = timeline(trace)
    attribution = attribute(trace, line)
    for moment in moments:
        event = int(held.columns["moment.event"][moment])
        of_explain = breakdown_at(trace, line, attribution, event).rows[GroupBy.CATEGORY]
        rows = {row.name: row.bytes for row in of_explain if row.bytes}
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
    walk = BlockTracker(trace.events, config, initial_state(trace, config))
    of, ranges = blocks(held), held.columns
    waited = 0
    for moment in moments:
        walk.advance_to(int(events[moment]) + 1)
        pieces = walk.blocks()
        alive = (of.born <= moment) & (moment < of.freed)
        assert where(of, alive) == [(p.start, p.stop) for p in pieces if p.state == LIVE]
        waiting = (of.freed <= moment) & (moment < of.done)
        theirs = [(p.start, p.stop) for p in pieces if p.state not in (LIVE, FREE)]
        # A free that completes at once is drawn so at the event that requests it.
        assert set(where(of, waiting)) <= set(theirs)
        assert len(theirs) - waiting.sum() <= 1
        waited += waiting.sum()
        there = (ranges["range.born"] <= moment) & (moment < ranges["range.freed"])
        start = ranges["range.address"][there]
        assert covered(zip(start, start + ranges["range.size"][there], strict=True)) == covered(
            (p.start, p.stop) for p in pieces
        )
    assert waited or situation != "several streams"


def where(of, which):
    size = of.requested + of.beyond
    return sorted(zip(of.address[which].tolist(), (of.address + size)[which].tolist(), strict=True))


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
    of = blocks(held)
    assert len(of.born) == most
    assert held.facts["together"] == int((trace.events.action == Action.ALLOC).sum()) - most
    check_sums(trace, held, range(len(held.columns["moment.event"])))
    peak = int(np.argmax(timeline(trace).allocated))
    assert peak in held.columns["moment.event"]
    at_peak = int(np.searchsorted(held.columns["moment.event"], peak))
    alive = ((of.born <= at_peak) & (at_peak < of.freed)).sum()
    assert alive == min(most, 7)  # what is alive at the peak comes first


def test_a_block_used_by_another_stream_is_freed_later():
    held = drawn(run(steps=1))
    of = blocks(held)
    waits = of.done - of.freed
    again = blocks(drawn(run(steps=3)))  # at the same addresses
    assert (again.done - again.freed).tolist() == [0, 0, *3 * waits[2:].tolist()]
    # The last that was requested is the first that completes, at once.
    assert sorted(waits[of.layer == "activations"]) == [0, 2, 4, 6]
    assert (waits[of.layer == "gradients"] == 0).all()


def test_an_unmap_splits_a_range_in_two():
    history = [
        Event(Action.SEGMENT_MAP, BASE, 60 * MIB),
        Event(Action.SEGMENT_UNMAP, BASE + 20 * MIB, 20 * MIB),
    ]
    at_end = [segment(BASE, 20 * MIB, expandable=True), segment(BASE + 40 * MIB, 20 * MIB, expandable=True)]
    held = drawn(trace_of(history, at_end, settings={"expandable_segments": "True", "conf": ""}))
    of = held.columns
    rows = zip(
        (of["range.address"] - BASE) // MIB,
        of["range.size"] // MIB,
        of["range.born"],
        of["range.freed"],
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
    of = held.columns
    moment = list(of["moment.event"]).index(4)
    place = of["moment.place"][moment]
    assert held.facts["phases"][of["moment.phase"][moment]] == "forward"
    assert of["moment.step"][moment] == 1
    assert held.words[of["place.module"][place]] == "blocks.0.fc"
    assert held.words[of["place.line"][place]] == "~/work/model.py:22"
    gradient = list(blocks(held).layer).index("gradients")
    told = {
        name: held.words[of[f"block.{name}"][gradient]] for name in ("name", "dtype", "shape", "module", "op")
    }
    assert told == {
        "name": "weight.grad", "dtype": "float32", "shape": "[1024, 1024]", "module": "blocks.0.fc",
        "op": "AddmmBackward0",
    }  # fmt: skip
    stack = of["block.stack"][gradient]
    frames = of["stack.frames"][of["stack.ends"][stack] : of["stack.ends"][stack + 1]]
    assert [held.words[one] for one in frames] == ["~/work/model.py:22  forward", "~/work/train.py:10  main"]


def test_every_moment_has_its_step():
    trace = run(marks=(Mark(0, MarkKind.FORWARD, 0), *run().marks))
    of = drawn(trace).columns
    steps = [location_at(trace, event).step for event in of["moment.event"].tolist()]
    assert of["moment.step"].tolist() == steps
    assert set(steps) == {0, 1, 2, 3}


def test_failed_allocations_are_in_the_payload():
    trace = run(steps=1)
    history = [Event(Action.OOM, 1000, 5 * GIB)]
    held = drawn(
        trace_of([Event(Action.SEGMENT_ALLOC, BASE, 20 * MIB), Event(Action.ALLOC, BASE, MIB), *history])
    )
    assert held.facts["failures"] == [[2, 5 * GIB]]
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
        labels=(Label(Phase.FORWARD, "fc", "", -1),),
        marks=(Mark(3, MarkKind.TRAINING_STEP, 4),),
        end=ScriptEnd("out of memory", 1),
    )
    held = drawn(trace)
    assert held.facts["old"] == 3
    assert held.columns["block.born"].tolist() == [0, 0, 0]
    assert (held.columns["moment.phase"] == tuple(Phase).index(Phase.FORWARD)).all()
    assert held.columns["moment.step"].tolist() == [6] * len(held.columns["moment.step"])
    check_sums(trace, held, range(len(held.columns["moment.event"])))
