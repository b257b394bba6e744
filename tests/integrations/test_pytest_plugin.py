"""`@pytest.mark.fits`: tests of other projects, which run on the ghost."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

TESTS = """
import pytest
import torch

@pytest.fixture
def weight():
    return torch.ones(1 << 20, device="cuda")  # cannot be set up without a GPU, but on the ghost

@pytest.mark.fits("1GiB", baseline="memory.json")
def test_that_fits(weight):
    weight.sum()

@pytest.mark.fits("1GiB")
def test_that_is_too_large():
    torch.ones(1 << 28, device="cuda")

@pytest.mark.fits(gpu="T4")
@pytest.mark.parametrize("number", [1])
def test_that_fails(number):
    assert torch.ones(1, device="cuda").numel() == 2

@pytest.mark.fits("1GiB")
def test_that_is_skipped():
    pytest.skip("for a reason")
"""


@pytest.fixture
def run(tmp_path):
    """Return a function that runs pytest on tests of ``TESTS`` in a folder of their own."""
    file = tmp_path / "test_memory.py"

    def call(*arguments, tests=TESTS, folder="."):
        file.write_text(tests)
        command = [sys.executable, "-m", "pytest", "-q", *arguments]
        return subprocess.run(command, cwd=tmp_path / folder, capture_output=True, text=True, check=False)

    return call


def test_a_test_that_does_not_fit_fails_with_what_it_needs_and_where_memory_ran_out(run):
    done = run("-k", "large")
    assert done.returncode == 1
    assert (
        "DOES NOT FIT   needs 1.50 GiB (assumed) of 1.00 GiB\ntest_memory.py::test_that_is_too_large"
        in done.stdout
    )
    assert 'torch.ones(1 << 28, device="cuda")' in done.stdout


@pytest.mark.slow
def test_a_test_passes_until_it_needs_more_than_its_baseline(run):
    assert "There is no baseline" in run("-k", "that_fits").stdout
    assert run("-k", "that_fits", "--memfit-update").returncode == 0
    grown = run("-k", "that_fits", tests=TESTS.replace("1 << 20", "1 << 21"))
    assert grown.returncode == 1
    assert "MEMORY GREW" in grown.stdout


@pytest.mark.slow
def test_a_test_that_fails_or_is_skipped_on_the_ghost_does_not_pass(run):
    done = run("-k", "fails or skipped")
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert "assert 1 == 2" in done.stdout


@pytest.mark.slow
def test_the_project_s_own_options_do_not_keep_a_chosen_test_from_running(run, tmp_path):
    (tmp_path / "pytest.ini").write_text('[pytest]\naddopts = --ff -m "not fits"\n')
    (tmp_path / "folder").mkdir()
    tests = TESTS.replace("weight.sum()", "import os\n    assert os.path.basename(os.getcwd()) == 'folder'")
    done = run("-m", "fits", "-k", "that_fits", "--memfit-update", "..", tests=tests, folder="folder")
    assert "1 passed" in done.stdout


def test_invalid_arguments_of_the_mark_are_named(run):
    done = run(tests=TESTS.replace('gpu="T4"', 'card="T4"'))
    assert done.returncode
    assert "pytest.mark.fits takes a budget" in done.stdout + done.stderr
