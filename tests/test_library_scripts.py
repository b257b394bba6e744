"""benchmarks/library_scripts.py and its ground truth, without running the libraries' scripts."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def load(name, monkeypatch):
    """Import a benchmark, a script outside any package."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def benchmark(monkeypatch):
    return load("library_scripts", monkeypatch)


@pytest.fixture
def truth():
    return importlib.import_module("support.attribution_truth")


def test_every_script_of_the_folder_is_run(benchmark):
    files = {path.stem for path in (BENCHMARKS / "library_scripts").glob("*.py")}
    assert files == {script.name for script in benchmark.SCRIPTS}


def test_no_script_mentions_memfit():
    texts = [path.read_text() for path in (BENCHMARKS / "library_scripts").glob("*.py")]
    assert not any("memfit" in text for text in texts)


@pytest.mark.parametrize(("option", "code"), [((), 1), (("--skip-missing",), 0)])
def test_a_missing_package_is_named_and_fails_unless_skipping_is_allowed(
    benchmark, monkeypatch, capsys, option, code
):
    absent = benchmark.LibraryScript("absent", ("no-such-package-at-all",))
    monkeypatch.setattr(benchmark, "SCRIPTS", (absent,))
    monkeypatch.setattr(sys, "argv", ["library_scripts.py", *option])
    assert benchmark.main() == code
    assert "SKIPPED absent: not installed: no-such-package-at-all" in capsys.readouterr().err


def test_peaks_are_read_from_the_ends_of_lines_and_of_progress_bars(benchmark):
    assert benchmark.printed_peaks("1/50 loss 1,5 B x\rstep 0  1,024 B\nbatch of 3 B\n") == [1024]


def test_of_each_row_the_moment_that_differs_most_is_kept(benchmark):
    rows = [benchmark.Row("inputs", f"backward {number}", 5, number) for number in (5, 1, 4)]
    assert [row.moment for row in benchmark.worst(rows)] == ["backward 1"]


def test_a_truth_that_ended_before_the_last_step_is_a_failure(benchmark):
    script, report = benchmark.LibraryScript("any", ()), {"peak": {"allocated": 7}}
    ended = {"backward": [{}] * 3, "end": [{"steps": 3, "peak": 7}]}
    assert not list(benchmark.miscounted(script, report, ended))
    for failed in (ended | {"backward": []}, ended | {"end": [{"steps": 0, "peak": 7}]}):
        assert list(benchmark.miscounted(script, report, failed))


def test_notes_that_differ_in_figures_only_are_one_line(benchmark):
    notes = [
        ("finds 8 elements", "a.py:1"),
        ("finds 1,024 elements", "b.py:2"),
        ("other", ""),
    ]
    assert list(benchmark.grouped(notes)) == ["- finds 8 elements (2 such notes)", "- other"]


def test_lists_dictionaries_and_idle_modules_with_the_shapes_of_a_model_are_copies(truth):
    model = torch.nn.Linear(37, 41)
    average, other = copy.deepcopy(model), torch.nn.Linear(41, 37)
    tensors = [one.detach().clone() for one in model.parameters()]
    frozen = {name: one.detach().clone() for name, one in model.named_parameters()}
    partial = [tensors[0].clone()]
    found = {id(one) for one in truth.copies_of_parameters({model})}
    assert {id(one) for one in (*average.parameters(), *tensors, *frozen.values())} <= found
    assert not {id(one) for one in (*model.parameters(), *other.parameters(), *partial)} & found
