"""The examples of each trainer: what they train is what `Engine` trains, and so is the memory they take."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[2] / "examples" / "trainers"
TRAINERS = ["accelerate", "lightning", "mmengine", "transformers"]
PROGRAM = str(Path(__file__).parent / "run_trainers.py")


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """Return, by trainer, the parameters that its example trains on the CPU."""
    file = tmp_path_factory.mktemp("cpu") / "trained.pt"
    subprocess.run([sys.executable, PROGRAM, file, "engine", *TRAINERS], check=True, capture_output=True)
    return {name: state for name, (state, _) in torch.load(file).items()}


@pytest.fixture(scope="module")
def on_ghost(tmp_path_factory):
    """Return, by trainer, the peak of its example on the ghost, in bytes."""
    file = tmp_path_factory.mktemp("ghost") / "trained.pt"
    command = ["-m", "memfit", "dry-run", "--to-end", "--", PROGRAM, file, "engine", *TRAINERS]
    subprocess.run([sys.executable, *command], check=True, capture_output=True)
    return {name: peak for name, (_, peak) in torch.load(file).items()}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_parameters_equal_those_of_the_engine_with_a_partial_window_and_token_weights(on_cpu, trainer):
    engine, other = on_cpu["engine"], on_cpu[trainer]
    assert other.keys() == engine.keys()
    for name, trained in engine.items():
        torch.testing.assert_close(other[name], trained, rtol=0, atol=2.4e-7, msg=name)  # 2 float32 roundings


def test_the_peak_on_the_ghost_is_the_engine_s(on_ghost):
    assert on_ghost == {}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_an_example_has_at_most_20_lines_of_code(trainer):
    text = (EXAMPLES / f"with_{trainer}.py").read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 20
