"""benchmarks/run.py: its table has every benchmark, and it runs one."""

import subprocess
import sys
from pathlib import Path

import pytest
from measuring import in_turns, interval, table

import run as runner

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OTHERS = {
    "run",
    "packed_networks",  # runs under memfit dry-run
    "planned_networks",  # likewise
    "gpu/calibrate",  # validate starts it
    "gpu/operators_child",  # operators starts it
}
"""Scripts that are no benchmarks by themselves."""


def scripts():
    """Return the names of the scripts in benchmarks/ and benchmarks/gpu/."""
    paths = (path for pattern in ("*.py", "gpu/*.py") for path in BENCHMARKS.glob(pattern))
    found = (path for path in paths if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"))
    return {str(path.relative_to(BENCHMARKS).with_suffix("")) for path in found}


def test_the_table_has_every_benchmark_once():
    names = [each.name for each in runner.BENCHMARKS]
    assert len(names) == len(set(names))
    assert set(names) == scripts() - OTHERS
    assert scripts() >= OTHERS


def test_a_page_names_each_benchmark():
    pages = [*(BENCHMARKS.parent / "docs").rglob("*.md"), BENCHMARKS.parent / "CONTRIBUTING.md"]
    named = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert [each.name for each in runner.BENCHMARKS if f"benchmarks/{each.name}.py" not in named] == []


def test_without_a_name_the_table_is_printed(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert runner.main() == 0
    printed = capsys.readouterr().out
    assert all(each.shows in printed for each in runner.BENCHMARKS)


def test_an_unknown_name_is_answered_with_the_table(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "no_such"])
    assert runner.main() == 2
    said = capsys.readouterr().err
    assert "No benchmark is named 'no_such'" in said
    assert "accuracy" in said


@pytest.mark.process
def test_a_benchmark_gets_its_arguments_and_returns_its_exit_code():
    command = [sys.executable, BENCHMARKS / "run.py", "ranks", "--only", "no_such"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no job no_such" in done.stderr


def test_ways_take_turns_and_each_round_begins_with_the_next():
    order = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    assert list(in_turns(ways, 2)) == [{"a": 1, "b": 2, "c": 3}, {"a": 6, "b": 4, "c": 5}]
    assert "".join(order) == "abcbca"


def test_the_interval_covers_the_median_and_leaves_out_outliers():
    assert interval([9.0, 1.0, 2.0, 3.0, 2.5, 2.2, 2.1, 0.1, 2.3]) == (1.0, 3.0)


def test_a_table_is_aligned_by_its_columns():
    assert table(("job", "bytes"), "lr", [("gpt", 1)]) == "| job | bytes |\n|---|--:|\n| gpt | 1 |"
    with pytest.raises(ValueError, match="2 columns are aligned by 'lrr'"):
        table(("job", "bytes"), "lrr", [])
