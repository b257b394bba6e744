"""The page holds what Python computed, to the byte; it loads nothing, and what a trace says stays text."""

import base64
import hashlib
import re
from dataclasses import replace

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
from memfit.errors import FileFormatError
from memfit.records import (
    Action,
    Advice,
    Figure,
    GroupBy,
    Label,
    Mark,
    MarkKind,
    Note,
    Phase,
    Provenance,
    ScriptEnd,
    SnapshotBlock,
)
from memfit.report.html.payload import payload
from memfit.report.html.texts import NO_FILE, PageTexts
from memfit.report.terminal.advice import advice_lines
from support.html_reports import EVIL, GIB, LONG, MIB, Elements, blocks, evil, report, run, sums, unpacked
from support.traces import BASE, Event, freed, segment, trace_of


def drawn(trace, most=100_000, *, source=True):
    line = timeline(trace)
    words = PageTexts(source=source)
    return unpacked(payload(trace, line, attribute(trace, line), summarize(trace), words, most=most).text)


def check_sums(trace, held, moments):
    """See that a page's layers are the rows of ``explain`` at some moments, and sum to what is allocated."""
    line = timeline(trace)
    attribution = attribute(trace, line)
    for moment in moments:
        event = int(held.columns["moment.event"][moment])
        of_explain = breakdown_at(trace, line, attribution, event).rows[GroupBy.CATEGORY]
        rows = {row.name: row.bytes for row in of_explain if row.bytes}
        assert sums(held, moment) == rows
        assert sum(rows.values()) == line.allocated[event]
        assert held.columns["moment.reserved"][moment] == line.reserved[event]


# -- sums ------------------------------------------------------------------------------------------


def test_every_moment_has_the_rows_of_explain():
    trace = run()
    held = drawn(trace)
    check_sums(trace, held, range(len(held.columns["moment.event"])))
    kinds = {"parameters", "buffers", "gradients", "activations", "temporaries", "rounding"}
    assert kinds <= {name for moment in range(30) for name in sums(held, moment)}


@pytest.mark.parametrize("situation", ["several streams", "expandable"])
@pytest.mark.parametrize("late", [False, True])
def test_the_real_allocator_is_drawn_piece_by_piece(drive, situation, late):
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
def test_what_is_drawn_together_is_still_counted(most):
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


def test_a_block_that_another_stream_uses_waits():
    held = drawn(run(steps=1))
    of = blocks(held)
    waits = of.done - of.freed
    again = blocks(drawn(run(steps=3)))  # at the same addresses
    assert (again.done - again.freed).tolist() == [0, 0, *3 * waits[2:].tolist()]
    # The last that was requested is the first that completes, at once.
    assert sorted(waits[of.layer == "activations"]) == [0, 2, 4, 6]
    assert (waits[of.layer == "gradients"] == 0).all()


def test_what_an_unmapping_cuts_is_two_ranges():
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


def test_a_history_that_begins_late_says_so():
    old = SnapshotBlock(BASE, 4 * MIB, 4 * MIB, "active_allocated")
    whole = segment(
        BASE, 20 * MIB, blocks=[old, SnapshotBlock(BASE + 4 * MIB, 16 * MIB, 16 * MIB, "inactive")]
    )
    held = drawn(trace_of([Event(Action.ALLOC, BASE + 4 * MIB, MIB), *freed(BASE + 4 * MIB, MIB)], [whole]))
    assert sums(held, 0) == {"before the history": 4 * MIB, "unknown": MIB}
    assert held.facts["old"] == 1


# -- what is told of moments and blocks ------------------------------------------------------------


def test_moments_and_blocks_are_told():
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


def test_failures_are_told():
    trace = run(steps=1)
    history = [Event(Action.OOM, 1000, 5 * GIB)]
    held = drawn(
        trace_of([Event(Action.SEGMENT_ALLOC, BASE, 20 * MIB), Event(Action.ALLOC, BASE, MIB), *history])
    )
    assert held.facts["failures"] == [[2, 5 * GIB]]
    assert drawn(trace).facts["failures"] == []


def test_the_answer_is_there_without_any_script(answer):
    text = report(run())
    page = Elements(text)
    answer = summarize(run())
    for term in answer.terms:
        assert f"{term.name}{term.figure.bytes:,}" in page.text
        assert str(term.figure.provenance) in page.text
    figures = {
        attributes["data-bytes"]
        for tag, attributes in page.found
        if tag == "dd" and "data-bytes" in attributes
    }
    assert {str(answer.peak_allocated), str(answer.peak_reserved), str(answer.peak_process.bytes)} <= figures
    assert str(80 * GIB) in figures
    assert "Peak in step 1 · backward · blocks.1.fc · AddmmBackward0" in page.text


CHECKPOINT = Advice(
    "fewer activations", "--checkpoint <0-2>", "+11 % time",
    saves=Figure(3 * GIB, Provenance.MEASURED), needs=Figure(9 * GIB, Provenance.EXACT), fits=False,
)  # fmt: skip


def test_advice_is_told_as_on_a_terminal():
    second = replace(CHECKPOINT, what="more of it", needs=Figure(7 * GIB, Provenance.EXACT), fits=True)
    text = report(run(), advice=(CHECKPOINT, second))
    assert re.findall(r"<li><b>(.*?)</b>", text) == [CHECKPOINT.what, second.what]
    lines = advice_lines(replace(summarize(run()), advice=(CHECKPOINT, second)), "")
    for told in (Elements(text).text, " ".join(line.plain for line in lines)):
        words = " ".join(told.replace("·", " ").split())
        assert "saves 3.0 GiB measured needs 9.0 GiB does not fit yet --checkpoint <0-2>" in words
        assert "needs 7.0 GiB fits" in words
        assert "costs +11 % time" in words
    assert "No change was found" in Elements(report(run(), advice=())).text
    assert "Do next" not in report(run())


def test_advice_is_escaped():
    evil = replace(CHECKPOINT, what=EVIL, how="/home/ada/train.py:3")
    text = report(run(), advice=(evil,), source=False)
    assert [tag for tag, _ in Elements(text).found].count("script") == 2
    assert "train.py" not in text


def test_an_out_of_memory_run_shows_the_total_it_needs():
    trace = run()
    small = replace(trace.device, total=replace(trace.device.total, bytes=256 * MIB))
    failed = [Event(Action.OOM, 1000, 5 * GIB)]
    trace = trace_of([Event(Action.SEGMENT_ALLOC, BASE, 20 * MIB), *failed], device=small)
    trace = replace(trace, end=ScriptEnd("out of memory", 1))
    in_all = Figure(3 * GIB, Provenance.EXACT)
    for advice in ((), (CHECKPOINT,)):
        text = Elements(report(trace, advice=advice, in_all=in_all)).text
        assert "With unlimited memory it needs 3.00 GiB" in text
        assert ("the script needs 3.0 GiB with unlimited memory" in text) == bool(advice)
    assert "With unlimited memory" not in Elements(report(trace)).text
    assert "For changes that make it fit, run again with --advise" in Elements(report(trace)).text
    assert "--advise" not in Elements(report(trace, advice=())).text


@pytest.mark.parametrize(
    ("untried", "said"),
    [
        (ScriptEnd("end", 3), "when run again without input, the script ended with exit code 3"),
        (
            ScriptEnd("exception", 1, "ValueError: no\nmore", "train.py:3"),
            "with ValueError: no ... train.py:3",
        ),
        (ScriptEnd("refused", 3, "train.py died"), "advice: train.py died"),
        (ScriptEnd("interrupted", 130), "interrupted."),
    ],
)
def test_why_there_is_no_more_advice(untried, said):
    for advice in ((), (CHECKPOINT,)):
        text = " ".join(Elements(report(run(), advice=advice, untried=untried)).text.split())
        assert f"No {'more ' * bool(advice)}advice: " in text
        assert said in text
        assert "No change was found" not in text
    text = report(run(), advice=(), untried=run().end)
    assert "No advice: the script ended with" in text


def test_a_device_that_is_too_small_says_what_is_short():
    trace = run()
    small = replace(trace.device, total=replace(trace.device.total, bytes=256 * MIB))
    assert "short 0.45 GiB" in Elements(report(replace(trace, device=small))).text


@pytest.mark.parametrize(
    "settings", [{"conf": "backend:cudaMallocAsync"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}]
)
def test_without_segments_there_is_no_map_and_all_else(settings):
    trace = trace_of(
        [Event(Action.ALLOC, BASE, MIB), Event(Action.FREE_REQUESTED, BASE, MIB)], settings=settings
    )
    held = unpacked(report(trace))
    assert "no-segments" in report(trace).split("<body", 1)[1][:60]
    assert not len(held.columns["range.size"])
    assert sum(sums(held, 0).values()) == MIB


def test_nothing_recorded_is_a_page_too():
    text = report(trace_of([]))
    assert not len(unpacked(text).columns["moment.event"])
    assert "Fewer than two training steps" in Elements(text).text


# -- nothing gets out, nothing gets in -------------------------------------------------------------


def test_names_are_shown_and_do_nothing():
    text = report(evil())
    text.encode()  # no lone surrogate is left
    page = Elements(text)
    assert [tag for tag, _ in page.found].count("script") == 2
    assert "img" not in {tag for tag, _ in page.found}
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on")]
    held = unpacked(text)
    for one in [page.text.replace("\n", " "), *held.words]:
        assert one.isprintable()
    assert "\\x1b[31m\\u202eevil\\u2066\\x00" in page.text
    assert any("caf\\udce9.py" in word for word in held.words)
    assert any(LONG in word for word in held.words)  # in full, for the details


def test_nothing_is_loaded_and_nothing_else_may_run():
    text = report(run())
    page = Elements(text)
    loads = {"src", "href", "srcset", "data", "action", "formaction", "background", "poster", "style"}
    assert not [attributes for _, attributes in page.found if loads & set(attributes)]
    assert not re.search(
        r"https?:|url\(|@import|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function"
        r"|import\(|fetch\(|XMLHttp|WebSocket|sendBeacon|localStorage",
        text,
    )
    (policy,) = [a["content"] for tag, a in page.found if tag == "meta" and "http-equiv" in a]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    for rule, pattern in (("script-src", r"<script>(.*?)</script>"), ("style-src", r"<style>(.*?)</style>")):
        (content,) = re.findall(pattern, text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[rule] == f"'sha256-{digest}'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}


def test_home_folders_are_shortened():
    text = report(run())
    held = unpacked(text)
    everything = text + "\n".join(held.words)
    assert "/home/ada" not in everything
    assert "~/secret" in everything


def test_without_source_no_file_is_named():
    trace = run(
        notes=(
            Note(
                Provenance.ASSUMED, "told /home/ada/data/x.bin and in train.py:10 (forward)", "/a/train.py:3"
            ),
        )
    )
    trace = replace(trace, labels=(*trace.labels, Label(Phase.LOSS, "", "graph 0 (f, model.py:37)", -1)))
    trace = replace(
        trace, end=replace(trace.end, exception="OSError: /home/ada/x", where="/home/ada/work/train.py:1")
    )
    # A script's name need not look like one.
    bare = replace(trace.frames[0], file="justaname", function="a_function")
    trace = replace(trace, frames=(*trace.frames, bare), stacks=(*trace.stacks, (2,)))
    trace.events.stack[3] = 2
    trace = replace(
        trace, command=("justaname",), notes=(*trace.notes, Note(Provenance.EXACT, "so", "justaname:1"))
    )
    with_source = report(trace)
    text = report(trace, source=False)
    held = unpacked(text)
    everything = text + "\n".join(held.words)
    for name in ("train.py", "model.py", "justaname", "a_function", "x.bin", "~/"):
        assert name in with_source + "\n".join(unpacked(with_source).words)
        assert name not in everything, name
    assert NO_FILE in everything
    assert not [word for word in held.words if re.search(r"\.py|:\d+$", word)]


def test_the_same_trace_makes_the_same_page():
    assert report(run()) == report(run())


def test_its_size_is_kept_small():
    assert len(report(run())) < 120_000
    assert len(report(run(steps=2_000))) < 400_000


@pytest.mark.parametrize("where", [{"address": 1 << 60}, {"size": 1 << 60}])
def test_what_no_device_has_is_refused(where):
    address, size = where.get("address", BASE), where.get("size", 2 * MIB)
    history = [Event(Action.SEGMENT_ALLOC, address, size), Event(Action.ALLOC, address, size)]
    with pytest.raises(FileFormatError, match="beyond what any device has"):
        report(trace_of(history))


# -- what is older than the history ----------------------------------------------------------------


def test_what_is_older_than_the_history_is_there_from_its_beginning():
    """A post-mortem begins with what was there: no time passed while it was told."""
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
