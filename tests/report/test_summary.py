"""The summary and its JSON: totals add up, names are escaped, and the JSON follows its schema."""

import builtins
import io
import json
from dataclasses import asdict, replace

import msgspec
import pytest
from rich.console import Console

import memfit
from memfit.records import (
    DryRun,
    Figure,
    Growth,
    Note,
    OutOfMemory,
    Phase,
    Provenance,
    ScriptEnd,
    ScriptLocation,
    SizeBound,
    Term,
)
from memfit.report.escape_control_characters import escaped
from memfit.report.public_json import public_json_type, result_to_json
from memfit.report.terminal.summary import print_summary
from support.html_reports import run

GIB = 1 << 30


def printed(answer, width=100, *, terminal=False):
    console = Console(
        file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, markup=False, emoji=False
    )
    print_summary(answer, console)
    return console.file.getvalue()


def test_the_summary_has_verdict_peak_and_terms(answer):
    text = printed(answer)
    assert "FITS SO FAR   needs 8.50 GiB of 80.00 GiB   leaves 71.50 GiB" in text
    assert "step 2 · backward · layers.3.mlp · MmBackward0 · /somewhere/train.py:12" in text
    assert "7,680 MiB" in text
    assert "Steady after step 2: step 3 left memory as it was." in text
    assert "a stand-in CUDA runtime" in text
    assert "\x1b" not in text


def test_a_step_without_a_time_has_a_line_that_says_why(answer):
    why = "the script replays a CUDA graph"
    assert f"\nNo time of a step: {why}.\n" in printed(replace(answer, step_time_unknown=why))
    assert "time of a step" not in printed(answer)


def test_a_printable_result_returns_its_text_in_a_notebook(answer, monkeypatch):
    """In a notebook, rich would display the lines itself: it detects IPython's shell by its class name."""
    text = printed(answer).splitlines()
    shell = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    assert Console().is_jupyter
    assert repr(answer).splitlines() == [line.rstrip() for line in text]


def test_every_result_prints_itself():
    trace = run()
    for found, first in (
        (memfit.summarize(trace), "FITS SO FAR   needs"),
        (memfit.explain(trace), "FITS SO FAR   needs"),
        (memfit.explain(trace).summary, "FITS SO FAR   needs"),
        (memfit.diff(trace, trace), "before  peak in: step 1"),
        (memfit.replay(trace, ["expandable_segments:True"]), "PYTORCH_ALLOC_CONF        fits"),
    ):
        assert str(found) == repr(found)
        assert first in repr(found)


def test_out_of_memory_shows_where_and_how_much(answer):
    failure = OutOfMemory(replace(answer.peak_place, phase=Phase.FORWARD), 3 * GIB, GIB, 2 * GIB)
    failed = replace(answer, verdict="out of memory", out_of_memory=failure)
    first, second, third, *_ = printed(failed, 300).splitlines()
    assert first == "OUT OF MEMORY   on a GPU of 80.00 GiB"
    where = "step 2 · forward · layers.3.mlp · MmBackward0 · /somewhere/train.py:12"
    assert second == f"Ran out in: {where}"
    assert third == "3.0 GiB requested, 1.0 GiB free."
    first, *_ = printed(replace(failed, needs=Figure(90 * GIB, Provenance.SIMULATED))).splitlines()
    assert first == "OUT OF MEMORY   needs 91.00 GiB; this GPU has 80.00 GiB"
    assert "Steady" not in printed(failed)


def test_a_need_that_rounds_to_the_size_of_the_gpu_is_shown_in_mib(answer):
    failure = OutOfMemory(answer.peak_place, 3 * GIB, GIB, 2 * GIB)
    needs = Figure(80 * GIB + (2 << 20) - answer.device.in_use, Provenance.SIMULATED)
    failed = replace(answer, verdict="out of memory", out_of_memory=failure, needs=needs)
    assert printed(failed).startswith("OUT OF MEMORY   needs 81,922 MiB; this GPU has 81,920 MiB")


def test_both_ends_of_what_is_needed_are_shown_if_convolutions_decide_it(answer):
    failure = OutOfMemory(answer.peak_place, 3 * GIB, GIB, 2 * GIB)
    needs, least = Figure(99 * GIB, Provenance.SIMULATED), Figure(90 * GIB, Provenance.SIMULATED)
    failed = replace(answer, verdict="out of memory", out_of_memory=failure, needs=needs)
    assert "convolutions" not in printed(failed)
    either = replace(failed, needs_without_workspaces=least)
    assert printed(either).startswith("OUT OF MEMORY   needs 91.00 to 100.00 GiB; this GPU has 80.00 GiB")
    assert "How much is enough depends on the workspaces of convolutions" in printed(either, 300)
    bounded = replace(either, bounds=(SizeBound("nonzero", "train.py:3", 9),))
    assert printed(bounded).startswith("OUT OF MEMORY   needs at most 100.00 GiB; this GPU has 80.00 GiB")
    near = replace(least, bytes=80 * GIB + (2 << 20) - answer.device.in_use)
    first = printed(replace(failed, needs_without_workspaces=near)).splitlines()[0]
    assert first == "OUT OF MEMORY   needs up to 100.00 GiB; this GPU has 80.00 GiB"


def test_outside_modules_the_place_names_the_function(answer):
    place = replace(answer.peak_place, module="", op="", function="evaluate")
    failure = OutOfMemory(place, 3 * GIB, GIB, 2 * GIB)
    text = printed(replace(answer, verdict="out of memory", out_of_memory=failure), 300)
    assert "Ran out in: step 2 · backward · /somewhere/train.py:12 in evaluate" in text


@pytest.mark.parametrize(("cached", "says"), [(2 * GIB, True), (2 * GIB - 1, False)])
def test_cached_memory_that_would_be_enough_is_named_as_fragmented(answer, cached, says):
    failure = OutOfMemory(answer.peak_place, 3 * GIB, GIB, 2 * GIB, cached)
    text = printed(replace(answer, verdict="out of memory", out_of_memory=failure), 300)
    words = "; PyTorch caches 2.0 GiB more, in blocks that this request cannot use (fragmentation)."
    assert (words in text) == says


@pytest.mark.parametrize(("needed", "says"), [(82 * GIB, True), (82 * GIB + 1, False)])
def test_fragmentation_is_named_only_if_it_holds_all_that_is_missing(answer, needed, says):
    failure = OutOfMemory(answer.peak_place, 3 * GIB, 2 * GIB, GIB, cached=2 * GIB)
    needs = Figure(needed, Provenance.SIMULATED)
    failed = replace(answer, verdict="out of memory", out_of_memory=failure, needs=needs)
    failed = replace(failed, device=replace(answer.device, in_use=0))
    assert ("(fragmentation)" in printed(failed, 300)) == says


def test_an_upper_bound_names_the_size_it_rests_on(answer):
    bound = SizeBound("nonzero", "/somewhere/train.py:3, in vision/heads.py:120", 9)
    lines = printed(replace(answer, bounds=(bound,)), width=300).splitlines()
    assert lines[0] == "FITS SO FAR   needs at most 8.50 GiB of 80.00 GiB   leaves at least 71.50 GiB"
    assert lines[1].startswith("At most: the size of nonzero depends on GPU values")
    assert (
        "largest possible; about 9 B of the peak depends on it (/somewhere/train.py:3, in vision/"
        "heads.py:120). --values heads.py:120=… sets" in lines[1]
    )
    failure = OutOfMemory(answer.peak_place, 3 * GIB, GIB, 2 * GIB)
    failed = replace(
        answer, bounds=(bound,), out_of_memory=failure, verdict="may not fit", needs=answer.peak_process
    )
    text = printed(failed)
    assert text.startswith("MAY NOT FIT   needs at most 8.50 GiB; this GPU has 80.00 GiB")
    assert json.loads(result_to_json(failed))["upper_bound"] == asdict(bound)


def test_growth_names_the_line(answer):
    text = printed(replace(answer, growth=Growth(None, 4 << 20, "/somewhere/train.py:7", leak=True)))
    assert "Still growing by 4.0 MiB a step after 3 steps, held by /somewhere/train.py:7." in text


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_summary_fits_any_width(answer, width):
    assert all(len(line) <= width for line in printed(answer, width).splitlines())


@pytest.mark.parametrize(
    "name",
    [
        "\x1b[31mred",
        "a\rb",
        "bell\x07",
        "\u202egnp.exe",
        "[bold]x[/bold]",
        ":smiley:",
        "\x9b31m",
        "\ud800",
    ],
)
def test_names_from_a_trace_cannot_touch_the_terminal(answer, name):
    place = ScriptLocation(1, Phase.FORWARD, name, name, name + ":3")
    hostile = replace(
        answer,
        peak_place=place,
        command=(name,),
        notes=(Note(Provenance.EXACT, name, name),),
        growth=Growth(None, 1, name, leak=True),
        versions={"torch": name},
        out_of_memory=OutOfMemory(place, 1, 0, 1),
    )
    text = printed(hostile, 400)
    assert escaped(name) in text
    assert not any(character in text for character in "\x1b\r\x07\u202e\x9b\ud800")
    assert json.loads(result_to_json(hostile))["peak"]["module"] == name


def test_long_names_are_shortened(answer):
    text = printed(replace(answer, peak_place=ScriptLocation(1, Phase.FORWARD, "x" * 10_000, "", "")), 200)
    assert len(text) < 4_000
    assert "[9,500 more]" in text.replace("\n", "")


def test_the_json_decodes_to_the_public_schema(answer):
    decoded = msgspec.json.decode(result_to_json(answer), type=public_json_type(DryRun))
    assert decoded.peak.process == 15 * GIB // 2
    assert decoded.terms[0].provenance == "exact"
    assert json.loads(result_to_json(answer))["out_of_memory"] is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("RuntimeError: size mismatch\n\tfor head: [10] and [9]", "RuntimeError: size mismatch ..."),
        ("ImportError: \nTimm is missing\nInstall it", "ImportError: Timm is missing ..."),
        ("KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_the_first_line_of_an_exception_is_shown(answer, text, shown):
    end = ScriptEnd("exception", 1, text, "train.py:4")
    out = printed(replace(answer, verdict="unknown", end=end))
    assert f"The script ended with {shown}  train.py:4" in out
    assert "\\n" not in out


def test_rows_that_would_read_as_zero_are_left_out(answer):
    terms = tuple(Term(name, Figure(size, Provenance.EXACT)) for name, size in SMALL_TERMS.items())
    names = [
        line.split("  ")[1].strip()
        for line in printed(replace(answer, terms=terms)).splitlines()
        if "GiB" in line and "exact" in line
    ]
    assert names == ["parameters", "activations"]


SMALL_TERMS = {
    "parameters": GIB,
    "gradients": 0,
    "optimizer state": 4 << 20,
    "activations": 6 << 20,
    "cached, not allocated": 0,
}
