"""The verdict says which part of the script the answer covers, how it ended, and how certain the fit is."""

from dataclasses import replace

import pytest

from memfit.records import ScriptEnd, StandIn
from memfit.report.terminal.verdict import verdict_of_run

COVERS = "This result covers {}. Not run: {}; they may need more. To run more, pass --to-end or --steps N."
BRANCHES = "On a GPU, the script may take other branches: it decides by GPU values."
LATER = "later parts, such as evaluation or larger batches"


@pytest.mark.parametrize(
    ("end", "steps", "first", "second"),
    [
        (ScriptEnd("steps", 0), 3, "FITS SO FAR   needs ", COVERS.format("3 training steps", LATER)),
        (ScriptEnd("steps", 0), 1, "FITS SO FAR   needs ", COVERS.format("1 training step", LATER)),
        (
            ScriptEnd("steps", 0, evaluation="/somewhere/train.py:8"),
            3,
            "FITS SO FAR   needs ",
            COVERS.format(
                "3 training steps",
                "the eval() in /somewhere/train.py:8, perhaps an evaluation, and other later parts",
            ),
        ),
        (ScriptEnd("end", 0), 1, "FITS   needs ", "This result covers the whole run: 1 training step."),
        (
            ScriptEnd("end", 0),
            0,
            "FITS   needs ",
            "This result covers the whole run, which has no training step.",
        ),
    ],
)
def test_a_verdict_names_what_it_covers(end, steps, first, second, answer):
    lines = verdict_of_run(replace(answer, end=end, steps=steps)).text.plain.splitlines()
    assert lines[0].startswith(first)
    assert lines[1] == second


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (ScriptEnd("end", 1, "config error", "/somewhere/train.py:4"), "exit code 1: config error"),
        (ScriptEnd("end", 2, "", "/somewhere/train.py:5"), "exit code 2  /somewhere/train.py:5"),
        (ScriptEnd("exception", 1, "KeyError: 'lr'", "/somewhere/train.py:6"), "KeyError: 'lr'"),
    ],
)
def test_an_incomplete_run_names_how_the_script_ended(end, line, answer):
    first, second = verdict_of_run(replace(answer, verdict="unknown", end=end)).text.plain.splitlines()
    assert first.startswith("INCOMPLETE")
    assert second.startswith(f"The script ended with {line}")


def test_a_run_whose_optimizers_never_stepped_lacks_what_an_update_needs(answer):
    reads = [StandIn("/somewhere/train.py:9", "an integer", "1", "train.py:9=0") for _ in range(4)]
    end = ScriptEnd("end", 0, missing_updates="Its optimizers never stepped", stand_ins=tuple(reads))
    run = replace(answer, verdict="unknown", end=end, steps=0)
    first, *others = verdict_of_run(run).text.plain.splitlines()
    assert first.startswith("INCOMPLETE   needs ")
    assert first.endswith(" without the missing updates")
    assert others == [
        "Its optimizers never stepped: the figures lack what these updates need.",
        "A GPU value that the script read may be why. The ghost computes none, and returned:",
        *["  1 for an integer at /somewhere/train.py:9 (to try another: --values train.py:9=0)"] * 3,
    ]
    assert "--values" not in verdict_of_run(run, hints=False).text.plain


@pytest.mark.parametrize(
    ("reason", "steps", "covers"),
    [
        ("end", 6, "This result covers the branches that ran: 6 training steps."),
        ("end", 0, "This result covers the branches that ran, which have no training step."),
        ("steps", 3, COVERS.format("3 training steps", LATER)),
    ],
)
def test_a_run_that_takes_branches_by_what_it_read_is_not_called_whole(reason, steps, covers, answer):
    read = StandIn("/somewhere/train.py:9", "a float", "1.0", "train.py:9=0")
    run = replace(answer, end=ScriptEnd(reason, 0, stand_ins=(read,)), steps=steps)
    first, *others = verdict_of_run(run).text.plain.splitlines()
    assert first.startswith("FITS ")
    assert others == [
        covers,
        f"{BRANCHES} The ghost computes none, and returned:",
        "  1.0 for a float at /somewhere/train.py:9 (to try another: --values train.py:9=0)",
    ]


def test_a_tight_verdict_names_the_term_that_is_not_certain(answer):
    first, second, third = verdict_of_run(
        replace(answer, verdict="tight", uncertainty=400 << 20)
    ).text.plain.splitlines()
    assert first.startswith("TIGHT SO FAR   needs ")
    assert second == (
        "The run may not fit: the size of the CUDA context is assumed. The real size may be up to 400.0 MiB "
        "larger. To measure it on your GPU, run memfit doctor --context."
    )
    assert third == COVERS.format("3 training steps", LATER)
