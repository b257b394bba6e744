"""No path, setting or word is broken within, however narrow the terminal: each can be copied and found."""

import io
from dataclasses import replace

import pytest

import memfit
from memfit.records import Advice, Figure, GroupBy, Note, Phase, Provenance, ScriptLocation
from memfit.report.terminal.allocator_comparison import print_allocator_comparison
from memfit.report.terminal.explanation import print_explanation
from memfit.report.terminal.summary import print_summary
from memfit.report.terminal.whole_words_console import WholeWordsConsole
from support.html_reports import FRAMES, run

PATH = (
    "/home/ada/a-folder-with-a-long-name/another-folder-with-a-long-name/experiments/train_language_model.py"
)
SETTING = "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"
FIGURE = Figure(1 << 30, Provenance.SIMULATED)


def words(show, width):
    console = WholeWordsConsole(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    show(console)
    return {word for word in console.file.getvalue().split() if not set("█▏▎▍▌▋▊▉") & set(word)}


@pytest.fixture(scope="module")
def trace():
    return run(frames=tuple(replace(frame, file=PATH) for frame in FRAMES))


def summary(trace):
    place = ScriptLocation(1, Phase.BACKWARD, "encoder.layers.11.attention", "MmBackward0", f"{PATH}:12")
    advice = Advice(
        ("expandable segments",),
        (f"PYTORCH_ALLOC_CONF={SETTING}",),
        f"{PATH}:3",
        "no time",
        FIGURE,
        FIGURE,
        True,
    )
    notes = (Note(Provenance.ASSUMED, "a value was read", f"{PATH}:9", sizes=True),)
    found = replace(memfit.summarize(trace), peak_place=place, advice=(advice,), notes=notes)
    return lambda console: print_summary(found, console)


def explanation(trace):
    return lambda console: print_explanation(memfit.explain(trace), console, by=GroupBy.LINE)


def comparison(trace):
    return lambda console: print_allocator_comparison(
        memfit.replay(trace, [SETTING, "expandable_segments:True"]), console
    )


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("of", [summary, explanation, comparison])
def test_every_word_of_a_wide_terminal_is_whole_on_a_narrow_one(of, width, trace):
    show = of(trace)
    assert words(show, 1000) - words(show, width) == set()


def test_a_setting_breaks_between_its_parts_only(trace):
    shown = words(comparison(trace), 80)
    assert {"garbage_collection_threshold:0.8,", "roundup_power2_divisions:[256:1,512:2,1024:4,>:8]"} <= shown


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_are_wrapped_to_the_terminal(width, trace):
    console = WholeWordsConsole(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    print_summary(memfit.summarize(trace), console)
    longest = max(len(line) for line in console.file.getvalue().splitlines() if PATH not in line)
    assert width - 20 < longest <= width
