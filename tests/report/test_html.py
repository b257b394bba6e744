"""The HTML page without a browser: summary and advice, hostile names, and that it loads nothing."""

import base64
import hashlib
import re
from dataclasses import replace

import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.errors import FileFormatError
from memfit.records import (
    Action,
    Advice,
    ByteRange,
    EquivalentRanks,
    EventLabel,
    Figure,
    JobRank,
    Note,
    PeakRange,
    Phase,
    Provenance,
    RangeCause,
    ScriptEnd,
)
from memfit.report.html.page_text_table import NO_FILE
from memfit.report.terminal.advice import advice_lines
from support.html_reports import EVIL, GIB, LONG, MIB, Elements, evil, report, run, sums, unpacked
from support.traces import BASE, Event, trace_of


def test_the_summary_needs_no_script(answer):
    text = report(run())
    page = Elements(text)
    answer = dry_run_of_trace(run())
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
    ("fewer activations",), ("--checkpoint <0-2>",), "", "+11 % time",
    saves=Figure(3 * GIB, Provenance.MEASURED), needs=Figure(90 * GIB, Provenance.EXACT), fits=False,
)  # fmt: skip


def test_the_ranks_of_a_job_are_a_table_of_their_own():
    one = replace(run(), rank=JobRank(3, 8))
    place = dry_run_of_trace(one).peak_place

    def role(rank, also, gibibytes):
        size = ByteRange(gibibytes * GIB, gibibytes * GIB)
        return EquivalentRanks(rank, also, PeakRange(size, size, size), "fits", place)

    text = report(one)
    assert "rank 3 of 8" in text
    assert "Every rank" not in text
    text = report(one, ranks=(role(3, (), 7), role(0, (1, 2, 4, 5, 6, 7), 6)))
    assert "Every rank; the rest of this page is about rank 3" in text
    rows = re.findall(r'<th scope="row">([^<]*)</th><td>fits</td><td data-bytes="(\d+)">([^<]*)<', text)
    assert rows == [("3", f"{7 * GIB}", "7.00 GiB"), ("0-2, 4-7", f"{6 * GIB}", "6.00 GiB")]


def test_a_range_of_peaks_is_the_first_note():
    one = run()
    peaks = [PeakRange.exactly(2 * GIB, 2 * GIB, 3 * GIB), PeakRange.exactly(3 * GIB, 4 * GIB, 5 * GIB)]
    found = replace(PeakRange.around(*peaks), causes=(RangeCause.WORKSPACES,))
    words = "A range: allocated 2.00-3.00 GiB, reserved 2.00-4.00 GiB, depending on the workspaces"
    assert words in report(one, peaks=found)
    assert words not in report(one)


def test_the_page_gives_the_sources_of_what_is_outside_the_allocator():
    device = replace(run().device, driver=Figure(480 * MIB, Provenance.ASSUMED, "NVML's total less CUDA's"))
    page = Elements(report(run(device=device))).text
    assert "CUDA context: a table" in page
    assert "in NVML's v1: 480.0 MiB that the driver reserves, which nvidia-smi omits: NVML's total" in page
    assert "in NVML's v1" not in Elements(report(run())).text


def test_advice_reads_as_on_the_terminal():
    needs = Figure(7 * GIB, Provenance.EXACT)
    second = replace(
        CHECKPOINT, changes=("more of it", "and more"), where="train.py:3", needs=needs, fits=True
    )
    text = report(run(), advice=(CHECKPOINT, second))
    assert re.findall(r"<li><b>(.*?)</b>", text) == ["fewer activations", "more of it + and more"]
    lines = advice_lines(replace(dry_run_of_trace(run()), advice=(CHECKPOINT, second)), "")
    for shown in (Elements(text).text, " ".join(line.plain for line in lines)):
        words = " ".join(shown.replace("·", " ").split())
        assert "saves 3.0 GiB measured needs 90.0 GiB does not fit --checkpoint <0-2>" in words
        assert "needs 7.0 GiB fits" in words
        assert "costs +11 % time" in words
        assert "train.py:3" in words
    assert "No change was found" in Elements(report(run(), advice=())).text
    assert "What to do next" not in report(run())


def test_advice_is_escaped():
    evil = replace(CHECKPOINT, changes=(EVIL,), how=("/home/ada/train.py:3",), where="/home/ada/train.py:4")
    text = report(run(), advice=(evil,), source=False)
    assert [tag for tag, _ in Elements(text).found].count("script") == 2
    assert "train.py" not in text


def test_an_out_of_memory_run_shows_the_total_it_needs():
    trace = run()
    small = replace(trace.device, total=replace(trace.device.total, bytes=256 * MIB))
    failed = [Event(Action.OOM, 1000, 5 * GIB)]
    trace = trace_of([Event(Action.SEGMENT_ALLOC, BASE, 20 * MIB), *failed], device=small)
    trace = replace(trace, end=ScriptEnd("out of memory", 1))
    needs = Figure(3 * GIB, Provenance.EXACT)
    for advice in ((), (CHECKPOINT,)):
        text = Elements(report(trace, advice=advice, needs=needs)).text
        assert "needs 3.00 GiB; this GPU has 0.25 GiB" in text
        assert "Unchanged, the run needs" not in text
    assert "3.00 GiB; this GPU" not in Elements(report(trace)).text
    assert "To find changes that make the script fit, run again with --advise" in Elements(report(trace)).text
    assert "--advise" not in Elements(report(trace, advice=())).text


@pytest.mark.parametrize("end", [ScriptEnd("out of memory", 1), ScriptEnd("end", 0)])
def test_a_run_that_does_not_fit_leaves_nothing_whether_or_not_it_caught_the_error(end):
    trace = run()
    failed = [Event(Action.SEGMENT_ALLOC, BASE, 20 * MIB), Event(Action.OOM, 1000, 5 * GIB)]
    text = Elements(report(replace(trace_of(failed, device=trace.device), end=end))).text
    assert "5.0 GiB more requested" in text
    assert "leaves" not in text


@pytest.mark.parametrize(
    ("untried", "words"),
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
def test_the_reason_for_missing_advice_is_shown(untried, words):
    for advice in ((), (CHECKPOINT,)):
        text = " ".join(Elements(report(run(), advice=advice, untried=untried)).text.split())
        assert f"No {'more ' * bool(advice)}advice: " in text
        assert words in text
        assert "No change was found" not in text
    text = report(run(), advice=(), untried=run().end)
    assert "No advice: the script ended with" in text


def test_a_device_that_is_too_small_shows_the_shortage():
    trace = run()
    small = replace(trace.device, total=replace(trace.device.total, bytes=256 * MIB))
    assert "short 0.45 GiB" in Elements(report(replace(trace, device=small))).text


@pytest.mark.parametrize(
    "settings", [{"conf": "backend:cudaMallocAsync"}, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}]
)
def test_without_segments_only_the_map_is_missing(settings):
    trace = trace_of(
        [Event(Action.ALLOC, BASE, MIB), Event(Action.FREE_REQUESTED, BASE, MIB)], settings=settings
    )
    held = unpacked(report(trace))
    assert "no-segments" in report(trace).split("<body", 1)[1][:60]
    assert not len(held.columns["range.size"])
    assert sum(sums(held, 0).values()) == MIB


def test_an_empty_trace_makes_a_page():
    text = report(trace_of([]))
    assert not len(unpacked(text).columns["moment.event"])
    assert "Fewer than two training steps" in Elements(text).text


# -- hostile names stay text, and the page loads nothing -------------------------------------------


def test_hostile_names_stay_text():
    text = report(evil())
    text.encode()  # no lone surrogate is left
    page = Elements(text)
    assert [tag for tag, _ in page.found].count("script") == 2
    assert "img" not in {tag for tag, _ in page.found}
    assert not [name for _, attributes in page.found for name in attributes if name.startswith("on")]
    held = unpacked(text)
    for shown in [page.text.replace("\n", " "), *held.words]:
        assert shown.isprintable()
    assert "\\x1b[31m\\u202eevil\\u2066\\x00" in page.text
    assert any("caf\\udce9.py" in word for word in held.words)
    assert any(LONG in word for word in held.words)  # in full, for the details


def test_the_page_loads_nothing_and_allows_only_its_own_script():
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


def test_without_source_no_file_name_remains():
    trace = run(
        notes=(
            Note(
                Provenance.ASSUMED, "told /home/ada/data/x.bin and in train.py:10 (forward)", "/a/train.py:3"
            ),
        )
    )
    trace = replace(trace, labels=(*trace.labels, EventLabel(Phase.LOSS, "", "graph 0 (f, model.py:37)", -1)))
    trace = replace(
        trace, end=replace(trace.end, exception="OSError: /home/ada/x", where="/home/ada/work/train.py:1")
    )
    # A script's file name need not end in .py.
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


def test_the_page_is_small():
    assert len(report(run())) < 120_000
    assert len(report(run(steps=2_000))) < 400_000


@pytest.mark.parametrize("where", [{"address": 1 << 60}, {"size": 1 << 60}])
def test_impossible_addresses_and_sizes_are_refused(where):
    address, size = where.get("address", BASE), where.get("size", 2 * MIB)
    history = [Event(Action.SEGMENT_ALLOC, address, size), Event(Action.ALLOC, address, size)]
    with pytest.raises(FileFormatError, match=r"than any device has|not an address on any device"):
        report(trace_of(history))
