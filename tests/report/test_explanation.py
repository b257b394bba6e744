"""What `explain` prints: the table asked for comes first, in the unit of the summary, with repeats folded."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

import memfit
from memfit.records import GroupBy, Note, Phase, PhaseMemoryChange, Provenance
from memfit.report.terminal.explanation import fold_repeated_changes, print_explanation
from support.html_reports import run

MIB, GIB = 1 << 20, 1 << 30


def printed(explanation, by=None, *, notes=False, width=100):
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False)
    print_explanation(explanation, console, by=by, notes=notes)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def explanation():
    return memfit.explain(run())


def test_a_table_that_was_asked_for_comes_first(explanation):
    assert printed(explanation).startswith("FITS SO FAR   needs ")
    by_module = printed(explanation, GroupBy.MODULE)
    assert by_module.startswith("Allocated, by module: step 1 ")
    assert "FITS" not in by_module
    assert printed(memfit.explain(run(), "optimizer")).startswith(
        "Allocated, by category: step 1 · optimizer"
    )


def test_notes_are_listed_below_a_table(explanation):
    summary = replace(explanation.summary, notes=(Note(Provenance.ASSUMED, "a value was read"),))
    noted = replace(explanation, summary=summary)
    assert "a value was read" not in printed(noted, GroupBy.MODULE)
    assert printed(noted, GroupBy.MODULE, notes=True).endswith("  assumed    a value was read\n")


def test_figures_have_the_unit_of_the_summary(explanation):
    text = printed(explanation, GroupBy.CATEGORY)
    assert ["32.00", "MiB", "80.0", "%", "4", "blocks", "activations"] in [
        row.split() for row in text.splitlines()
    ]
    large = replace(explanation, summary=replace(explanation.summary, peak_reserved=GIB))
    assert ["0.03", "GiB", "80.0", "%"] in [
        row.split()[:4] for row in printed(large, GroupBy.CATEGORY).splitlines()
    ]
    assert "What each phase changed, in MiB of blocks:" in text
    assert " B\n" not in text


def test_rows_that_would_read_as_zero_are_left_out(explanation):
    assert "buffers" in [row.name for row in explanation.held.rows[GroupBy.CATEGORY] if row.bytes]
    text = printed(explanation, GroupBy.CATEGORY)
    assert not [row for row in text.splitlines() if row.split()[:1] == ["0.00"]]
    assert "buffers" not in text


def change(phase, step=1, after=0, bytes_=0):
    return PhaseMemoryChange(step, phase, (("gradients", bytes_),) if bytes_ else (), bytes_, after, after)


def test_micro_batches_that_change_the_same_are_one_row_each():
    setup, update = change(Phase.SETUP, 0, 10, 10), change(Phase.OPTIMIZER, 1, 30, 5)
    first = [change(Phase.FORWARD, 1, 20, 10), change(Phase.BACKWARD, 1, 25, 5)]
    others = [change(Phase.FORWARD, 1, 35, 10), change(Phase.BACKWARD, 1, 25, -10)]
    last = [change(Phase.FORWARD, 2, 35, 10), change(Phase.BACKWARD, 2, 25, -10)]
    found = fold_repeated_changes((setup, *first, *others * 7, update, *last))
    assert found == [
        (setup, 1),
        *((part, 1) for part in first),
        *((part, 7) for part in others),
        (update, 1),
        *((part, 1) for part in last),
    ]


def test_a_repeated_row_says_how_often(explanation):
    parts = [change(Phase.FORWARD, 1, 40 * MIB, 10 * MIB), change(Phase.BACKWARD, 1, 30 * MIB, -10 * MIB)]
    rows = printed(replace(explanation, ledger=tuple(parts * 3))).partition("What each phase")[2].splitlines()
    assert [row.split()[:4] for row in rows if "step 1" in row] == [
        ["step", "1", "forward", "(3"],
        ["step", "1", "backward", "(3"],
    ]
