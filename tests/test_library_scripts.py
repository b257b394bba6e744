"""benchmarks/library_scripts.py and its ground truth, without running the libraries' scripts."""

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
def truth(monkeypatch):
    return load("attribution_truth", monkeypatch)


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


def test_lists_and_dictionaries_with_the_shapes_of_all_parameters_are_copies(truth):
    model = torch.nn.Linear(37, 41)
    average = [one.detach().clone() for one in model.parameters()]
    frozen = {name: one.detach().clone() for name, one in model.named_parameters()}
    partial = [average[0].clone()]
    found = {id(one) for one in truth.copies_of_parameters()}
    assert {id(one) for one in (*average, *frozen.values())} <= found
    assert id(partial[0]) not in found
