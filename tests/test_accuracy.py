"""Published figures of real cards that whole training jobs must meet: the fast rows of benchmarks/accuracy.

The figures, their sources and the allowed deviations are in benchmarks/accuracy/rows.toml;
`python benchmarks/accuracy.py` runs all of them.
"""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import measuring
import pytest

from support import warm_process

pytestmark = pytest.mark.process

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RESULTS = (BENCHMARKS / "results" / "accuracy-torch-2.14.1.md").read_text()
NUMBER = r"(?<![\d.,])\d[\d,]{3,}|\d+\.\d\d(?!\d)"
"""A large integer, or a number with two decimals."""


def load():
    """Import benchmarks/accuracy.py, a script outside any package."""
    spec = importlib.util.spec_from_file_location("accuracy", BENCHMARKS / "accuracy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


accuracy = load()
ROWS, SOURCES = accuracy.rows()
FIGURES = {"allocated", "reserved", "process"} | {
    "plain",
    "checkpointed",
}  # the second two: small_checkpointed.py
FIGURES |= {"after_model", "in_model", "before_step", "forward_backward", "after_step", "in_step"}
# data_parallel.py, naive_ddp.py
FIGURES |= {"reserved_after_wrap"}  # qlora_fsdp.py
ONE_RUN = ("data_parallel.py", "zero1", "--batch", "2", "--bf16")  # of set I, as rank 1: five figures
FEWER_STEPS = ("--steps", "4")  # rank 1's peaks are those of each step; the benchmark makes all 25
SAMPLE = [row for row in ROWS if row.set in "DE"] + [
    replace(row, run=(*row.run, *FEWER_STEPS))
    for row in ROWS
    if row.run == ONE_RUN and row.options[-2:] == ("--rank", "1")
]
SLOW = {
    "ViT-L/16, batch 64, bfloat16 parameters",
    "ViT-L/16, batch 64, mixed precision (float16)",
    "ViT-L/16, one image, Adam",
    "ViT-L/16, one image, Adam stepped in backward",
}
"""Rows of the sample that are similar to others of it."""


@pytest.fixture(scope="module")
def runs():
    """Return runs in forks of a warm process."""
    in_forks = SimpleNamespace(run=warm_process.run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "subprocess", in_forks)
        yield accuracy.Runs()


def test_no_row_has_the_letter_of_the_published_cards():
    """``--sets J`` runs those alone."""
    assert "J" not in {row.set for row in ROWS}


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[pytest.mark.slow] * (row.what in SLOW), id=row.what) for row in SAMPLE],
)
def test_the_figure_equals_that_of_a_real_card(row, runs):
    extra = row.then  # the run that matches the author's; the benchmark shows the other
    result = accuracy.RowResult(row, row.ours(runs, then=bool(extra)), None)
    assert result.met, f"{result.today:.3f} {row.unit}, published {row.theirs:.3f}: {result.difference:+.2f}"
    if not extra:
        assert f"| {' | '.join((row.set, *accuracy.cells(result)))} |" in RESULTS


def test_every_figure_of_the_readme_s_table_is_one_of_the_results():
    text = (BENCHMARKS.parent / "README.md").read_text()
    table = text.partition("| training on a real card |")[2].partition("\n\n")[0]
    figures = [
        figure for row in table.splitlines()[2:] for figure in re.findall(NUMBER, row.split("|", 2)[2])
    ]
    assert len(figures) >= 14
    assert [each for each in figures if each not in re.findall(NUMBER, RESULTS)] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.set} {row.what}")
def test_every_row_is_complete(row):
    assert (BENCHMARKS / "accuracy" / row.run[0]).is_file()
    assert row.source in SOURCES
    assert row.unit == "of base" if row.over else row.unit in accuracy.BYTES
    assert row.figure in FIGURES
    assert row.theirs > 0
    if row.within > 1:
        assert row.explained
    for other in (row.minus, row.over):
        assert not other or other[0] == row.run[0]


def test_a_slope_is_the_difference_of_two_runs_over_the_samples_between():
    row = accuracy.Row(
        set="X",
        what="",
        run=("job.py", "3"),
        minus=("job.py", "1"),
        per=2,
        figure="reserved",
        published=120,
        outside=20,
        unit="MiB",
        source="",
        within=1,
        explained="",
    )
    runs = accuracy.Runs()
    runs._known = {"job.py 3": {"reserved": 130 << 20}, "job.py 1": {"reserved": 31 << 20}}
    result = accuracy.measure(row, runs)
    assert row.theirs == 50
    assert result.today == 49.5
    assert result.difference == -1
    assert result.met
    assert not accuracy.RowResult(row, 50.6, None).met


def test_a_ratio_is_one_run_over_another():
    row = next(row for row in ROWS if row.over)
    runs = accuracy.Runs()
    runs._known = {
        " ".join((*row.options, *run)): {row.figure: amount}
        for run, amount in ((row.run, 3 << 20), (row.over, 4 << 20))
    }
    assert accuracy.measure(row, runs).today == 0.75
    assert round(row.theirs, 3) == 0.773  # of the published base


@pytest.mark.parametrize(
    ("ghost", "met"), [((8, 12), True), ((10, 12), False), ((8, 10), False), ((8, 14), False)]
)
def test_what_was_measured_must_be_inside_the_ghosts_range(ghost, met):
    row = next(row for row in ROWS if row.least is not None and row.unit == "GB")
    row = replace(row, least=9, published=11, within=10)
    runs, (least, most) = accuracy.Runs(), ghost
    known = {row.figure: most * 10**9, f"least_{row.figure}": least * 10**9}
    runs._known = {" ".join((*row.options, *row.run)): known}
    result = accuracy.measure(row, runs)
    assert (result.lower, result.today, result.met) == (least, most, met)


def test_a_run_that_fails_has_no_figure():
    row = ROWS[0]
    with pytest.raises(SystemExit, match="did not run to completion"):
        accuracy.dry_run((*row.run, "--no-such-option"), row.options, row.environment)
