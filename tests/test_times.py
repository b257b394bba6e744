"""Published step times of benchmarks/times.toml: complete rows; errors and ratios computed as stated."""

import importlib.util
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.devices import find_device

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def times():
    """Import benchmarks/times.py, a script outside any package."""
    spec = importlib.util.spec_from_file_location("published_times", BENCHMARKS / "times.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["published_times"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_row_has_a_card_a_script_and_a_unit(times):
    rows, sources = times.read_rows()
    assert len(rows) >= 60
    assert len({row.card for row in rows}) >= 5
    assert all(source["cite"] and source["assumed"] for source in sources)
    for row in rows:
        find_device(row.card)
        find_device(row.ghost or row.card)
        assert Path(row.job[row.job.index("--") + 1]).is_file()
        assert row.unit in ("ms", "steps/s", "samples/s", "tokens/s")
        assert row.counts in ("step", "forward+backward")
        assert row.per > 1 or row.source == "NeuSight"
        assert 1e-2 < row.seconds < 20


def test_a_ratio_has_two_rows_of_one_source_and_card(times):
    rows, _ = times.read_rows()
    named = Counter(name for row in rows for name in row.pair)
    assert set(named.values()) == {2}
    assert all(len({(row.source, row.card) for row in rows if name in row.pair}) == 1 for name in named)


def test_rows_are_chosen_by_source_card_script_and_arguments(times):
    assert len(times.read_rows("^mem-run-estimator")[0]) == 17
    chosen, _ = times.read_rows("H100-80GB .*gpt2-large")
    assert [row.run for row in chosen] == ["gpt2-large --batch-size 1", "gpt2-large --batch-size 4"]


def test_published_figures_become_seconds_of_a_step(times):
    row = times.read_rows("^own")[0][0]
    assert row.seconds == pytest.approx(0.3128)
    assert replace(row, unit="tokens/s", per=8192, published=4096).seconds == 2
    assert replace(row, unit="samples/s", per=256, published=512).seconds == 0.5
    assert replace(row, unit="steps/s", per=256, published=4).seconds == 0.25


def test_errors_intervals_and_ratios(times):
    first, second, *_ = times.read_rows("^own")[0]
    first, second = replace(first, per=16), replace(second, per=32)
    long = times.TimedResult(first, 0.3128 * 1.2, 0.33, 0.4, 0.1564, first.allocated)
    near = times.TimedResult(second, 0.0686 * 0.9, 0.05, 0.07, 0.0343, round(1.02 * second.allocated))
    assert long.error == pytest.approx(0.2)
    assert (long.held, near.held) == (False, True)
    assert (long.memory_error, near.memory_error) == (0, pytest.approx(0.02))
    (ratio,) = times.ratios([long, near])
    assert ratio.published == pytest.approx(0.0686 / 0.3128 / 2)
    assert ratio.predicted == pytest.approx(ratio.published * 0.9 / 1.2)
    assert times.ratios([long]) == []
    assert times.summary([long, near])[-1] == (
        *("all", "2", "15.0%", "20.0%", "50.0%", "+5.0%"),
        "50.0%",
    )
    blind = replace(long, row=replace(first, blind="2026-11-30"))
    assert [line[0] for line in times.summary([near, blind])] == [
        "H100-80GB",
        "H100-80GB, blind",
        "all",
        "all, blind",
    ]


def test_a_row_under_a_plan_runs_under_it_and_peers_are_judged_on_their_own_rows(times):
    (rows, sources) = times.read_rows("^own")
    planned = next(row for row in rows if row.plan)
    options = planned.job[: planned.job.index("--")]
    assert Path(options[options.index("--plan") + 1]).is_file()
    plain = times.TimedResult(rows[0], 0.3128 * 1.1, 0.3, 0.4, 0.1564, rows[0].allocated, peer=0.3128 * 0.6)
    text = times.markdown([plain, replace(plain, row=planned, peer=None)], sources)
    assert "| PyTorch's RuntimeEstimator | 1 | 40.0% | -40.0% |" in text
    assert "| memfit | 1 | 10.0% | +10.0% |" in text
    assert "RuntimeEstimator" not in times.markdown([replace(plain, peer=None)], sources)
