"""benchmarks/gpu/operators.py in rehearsal, and how it compares an operator's two results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.modules_by_path import module_of

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
SAMPLE = {"peak": 1024, "left": 512, "requested_peak": 600, "requested_left": 8, "requests": 2}


@pytest.fixture(scope="module")
def table():
    """Return the operators_table module, loaded by path: benchmarks are not a package."""
    return module_of(GPU / "operators_table.py")


def outcome(table, card, ghost):
    return table.compare("float32 op", {"samples": card}, {"samples": ghost})


def test_samples_that_read_values_are_counted_apart(table):
    larger = {**SAMPLE, "requested_peak": 700}
    assert outcome(table, [SAMPLE], [SAMPLE]).outcome == "equal"
    assert outcome(table, [SAMPLE], [{**larger, "reads": True}]).outcome == "reads values"
    found = outcome(table, [SAMPLE, SAMPLE], [{**larger, "peak": 9999, "reads": True}, larger])
    assert (found.outcome, found.differing, found.index, found.largest) == ("differs", 1, 1, 100)


def test_errors_and_missing_results_are_no_differences(table):
    failed = {**SAMPLE, "peak": 0, "error": "RuntimeError: no"}
    assert outcome(table, [failed], [failed]).outcome == "both raise"
    assert outcome(table, [failed], [SAMPLE]).outcome == "card raises"
    assert outcome(table, [SAMPLE], [failed]).outcome == "ghost raises"
    assert outcome(table, [{**SAMPLE, "sample": "a"}], [{**SAMPLE, "sample": "b"}]).outcome == "other samples"
    assert table.compare("float32 op", {"died": "code -6"}, {}).outcome == "not run"


@pytest.mark.process
@pytest.mark.slow
def test_a_rehearsal_of_operators_shows_no_difference_and_is_marked_as_one(tmp_path):
    pytest.importorskip("expecttest", reason="PyTorch's database of operators imports it")
    few = ("larger linalg svd gesvdj float32 256x256", "float32 linalg_svd", "larger unique float32 1000")
    options = ("--on-card", "1", "--on-ghost", "1", "--inputs", "2", "--seconds", "250", "--out", tmp_path)
    done = subprocess.run(
        [sys.executable, GPU / "operators.py", "--rehearse", "H100-80GB", *options, "--only", *few],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.glob("rehearsal-NVIDIA_H100_80GB_HBM3-*-operators.json")
    result = json.loads(file.read_text())
    assert set(few) <= set(result["keys"]) == set(result["card"]) == set(result["ghost"])
    assert result["card"] == result["ghost"]
    (svd,) = result["ghost"]["larger linalg svd gesvdj float32 256x256"]["samples"]
    assert svd["requested_peak"] > svd["requested_left"] > 3 * 256 * 4
    assert result["ghost"]["larger unique float32 1000"]["samples"][0]["reads"]
    assert file.with_suffix(".md").read_text().startswith("# REHEARSAL, nothing was measured: operators on")


def test_the_rows_of_a_stored_table_are_read():
    today = module_of(GPU / "operators_today.py")
    (table,) = (GPU / "results").glob("*-operators.md")
    profile, rows = today.read_table(table.read_text(encoding="utf-8"))
    assert profile == "H100-80GB"
    assert len(rows) == 202
    found = {row.name: row for row in rows}
    stft = found["larger fft stft float32 4x100000"]
    assert (stft.card, stft.ghost) == (14_447_556, 20_878_724)
    coalesce = found["larger sparse coo coalesce float32 20000"]  # one figure for both sides
    assert coalesce.card == coalesce.ghost == 14_080_000
