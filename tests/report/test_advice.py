"""Advice on the terminal: what it achieves, alternatives and combinations, and whether the run then fits."""

from dataclasses import replace

import pytest

from memfit.records import Advice, Figure, Provenance, ScriptEnd, SizeBound
from memfit.report.terminal.advice import advice_lines

GIB = 1 << 30


def advice(*changes, needs, fits=True, **more):
    """Return advice with so many GiB needed."""
    figure = Figure(needs * GIB, Provenance.EXACT)
    return Advice(changes, ("--fast",), more.get("where", ""), "no time", figure, figure, fits)


def printed(answer, found, remarks=()):
    """Return the lines of advice for a run that is out of memory."""
    answer = replace(
        answer, verdict="out of memory", advice=tuple(found), advice_remarks=remarks, uncertainty=GIB
    )
    return [line.plain.rstrip() for line in advice_lines(answer, "")][1:]


SMALL, LARGE = 70, 90
"""GiB that fit the device, which has 80, and that do not."""


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([advice("a", needs=SMALL)], "This is enough:"),
        ([advice("a", needs=SMALL)] * 2, "Each of these is enough on its own:"),
        ([advice("a", "b", needs=SMALL)], "No single change is enough. Together, these are:"),
        ([advice("a", "b", needs=SMALL)] * 2, "No single change is enough. Each of these combinations is:"),
        ([advice("a", needs=SMALL, fits=False)], "No change is certain to be enough, because the CUDA"),
        (
            [advice("a", needs=LARGE, fits=False)],
            "No change that memfit tried is enough. These save the most:",
        ),
    ],
)
def test_the_heading_names_what_the_changes_achieve(answer, found, words):
    assert printed(answer, found)[0].startswith(f"What to do next. {words}")


def test_changes_of_a_run_that_fits_lower_its_peak(answer):
    found = (advice("a", needs=SMALL),)
    for several, words in (
        (found, "This lowers the peak of the 3 training steps."),
        (found * 2, "Each of these lowers the peak of the 3 training steps on its own."),
    ):
        lines = list(advice_lines(replace(answer, advice=several), ""))
        assert lines[1].plain.startswith(f"What to do next. {words}")


def test_a_combination_lists_its_changes_and_the_place(answer):
    found = [advice("batch size 2", "bf16", needs=SMALL, where="/somewhere/train.py:31")]
    assert printed(answer, found, ("One sample takes 2 GiB.",))[1:] == [
        "  1 batch size 2  saves   70.0 GiB exact      needs   70.0 GiB  fits",
        "  + bf16",
        "    --fast",
        "    in /somewhere/train.py:31",
        "    costs no time",
        "One sample takes 2 GiB.",
    ]


def test_advice_for_an_upper_bound_says_at_most(answer):
    bounded = replace(answer, bounds=(SizeBound("nonzero", "train.py:3", 9),))
    (_, line, *_) = printed(bounded, [advice("a", needs=SMALL)])
    assert "needs at most   70.0 GiB" in line


@pytest.mark.parametrize(
    ("needs", "fits", "words"),
    [
        (70, True, "fits"),
        (79, False, "tight"),
        (90, False, "does not fit"),
        (90, None, "GiB"),
    ],
)
def test_a_fit_that_rests_on_an_assumption_is_tight(answer, needs, fits, words):
    """As for the verdict: less is left than the CUDA context may take in addition."""
    (_, line, *_) = printed(answer, [advice("a", needs=needs, fits=fits)])
    assert line.endswith(words)


def test_an_interrupted_search_is_reported_below_the_advice(answer):
    answer = replace(answer, advice=(advice("a", needs=SMALL),), untried=ScriptEnd("interrupted", 130))
    assert [line.plain for line in advice_lines(answer, "No more advice: interrupted.")][-1] == (
        "No more advice: interrupted."
    )
