"""The examples of each trainer: what they train is what `Engine` trains, and so is the memory they take.

All have a last window of one batch instead of three, and batches with different numbers of tokens.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import warm_process

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
PROGRAM = str(Path(__file__).parent / "run_trainers.py")
MORE_THAN_ENGINE = {"accelerate": -512, "lightning": -3 * 512, "mmengine": 0, "transformers": 5 * 512}
"""Bytes of the peak: each loop holds other scalars (losses, weights), a block of 512 bytes each, and Trainer
holds the batches of a whole window."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return, by dtype and trainer, the parameters that its example trains on the CPU."""
    file = tmp_path_factory.mktemp("cpu") / "trained.pt"
    command = [sys.executable, PROGRAM, file, "engine", *MORE_THAN_ENGINE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(file)


@pytest.mark.parametrize("trainer", MORE_THAN_ENGINE)
def test_parameters_equal_those_of_the_engine_with_a_partial_window_and_token_weights(trained, trainer):
    assert difference(trained["float32"]["engine"], trained["float32"][trainer]) <= 2.4e-7


@pytest.mark.parametrize("trainer", MORE_THAN_ENGINE)
def test_under_autocast_they_are_equal_bit_for_bit_if_windows_are_full(trained, trainer):
    # Trainer divides by all tokens of a window from the start, so that bfloat16 rounds other gradients.
    weights = ", equal weights" if trainer == "transformers" else ""
    of = trained[f"bfloat16{weights}"]
    assert difference(of["engine"], of[trainer]) == 0.0


def difference(parameters, others):
    """Return the largest difference of two models' parameters."""
    assert parameters.keys() == others.keys()
    return max((parameter - others[name]).abs().max().item() for name, parameter in parameters.items())


@pytest.fixture(scope="module")
def peak_of_engine(tmp_path_factory):
    return peak("engine", tmp_path_factory.mktemp("engine"))


@pytest.mark.parametrize(
    "trainer",
    [pytest.param(each, marks=[pytest.mark.slow] * (each != "accelerate")) for each in MORE_THAN_ENGINE],
)
def test_the_peak_on_the_ghost_is_the_engine_s_but_for_scalars_and_batches(peak_of_engine, trainer, tmp_path):
    assert peak(trainer, tmp_path) - peak_of_engine == MORE_THAN_ENGINE[trainer]


def peak(trainer, folder):
    """Return the most bytes that an example allocates on the ghost."""
    command = ("dry-run", "--to-end", "--json", "answer.json", "--", EXAMPLES / f"with_{trainer}.py")
    done = warm_process.memfit(*command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "answer.json").read_text())["peak"]["allocated"]


@pytest.mark.parametrize("trainer", MORE_THAN_ENGINE)
def test_an_example_has_at_most_20_lines_of_code(trainer):
    text = (EXAMPLES / f"with_{trainer}.py").read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 20


@pytest.mark.parametrize("trainer", MORE_THAN_ENGINE)
def test_the_page_about_trainers_shows_the_examples(trainer):
    page = (EXAMPLES.parents[1] / "docs/trainers.md").read_text()
    assert (EXAMPLES / f"with_{trainer}.py").read_text() in page
