"""One process as rank r of 2 against 2 real ghosts: a sample of ``benchmarks/ranks.py --only witness``."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
@pytest.mark.process
def test_each_rank_holds_what_it_holds_beside_real_ones(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    witness = importlib.import_module("rank_tables.witness")
    first, second = witness.compare(BENCHMARKS / "rank_jobs/uneven_zero1.py", 2)
    assert (first.failure, second.failure) == ("", "")
    assert first.cells[2] != second.cells[2]  # else a mistaken rank would not show
