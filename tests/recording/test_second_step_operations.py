"""Which training step of a script is recorded, and which of its models."""

import msgspec
import pytest
import torch
from torch import nn

from memfit.patching.installed_hooks import InstalledHooks
from memfit.recording.second_step_operations import SecondStepRecorder
from memfit.records import StepOperations


@pytest.fixture
def recorded(tmp_path):
    """Return a function that runs a script's function, and returns what was recorded."""
    hooks, file = InstalledHooks(), tmp_path / "operations.json"

    def run(script):
        SecondStepRecorder(file).install(hooks)
        try:
            script()
        finally:
            hooks.remove()
        if not file.exists():
            return None
        return msgspec.json.decode(file.read_bytes(), type=StepOperations)

    return run


def train(model, optimizer, width, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, width)).square().mean().backward()
        optimizer.step()


def test_the_second_step_is_recorded_and_only_that(recorded):
    def script():
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        train(model, torch.optim.SGD(model.parameters()), 8, 3)

    step = recorded(script)
    assert [call.module for call in step.calls] == ["", "0", "1"]
    assert step.optimizer == 0


def test_a_script_of_one_step_has_nothing_to_record(recorded):
    def script():
        model = nn.Linear(8, 8)
        train(model, torch.optim.SGD(model.parameters()), 8, 1)

    assert recorded(script) is None


def test_of_two_models_the_one_that_saves_most_is_kept_with_its_optimizer(recorded):
    def script():
        small, large = nn.Linear(8, 8), nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        optimizers = torch.optim.SGD(small.parameters()), torch.optim.SGD(large.parameters())
        for _ in range(3):
            train(large, optimizers[1], 64, 1)
            train(small, optimizers[0], 8, 1)

    step = recorded(script)
    assert [call.kind for call in step.calls] == ["Sequential", "Linear", "ReLU", "Linear"]
    assert step.optimizer == 1


def test_with_accumulation_one_micro_batch_is_recorded(recorded):
    def script():
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            for _ in range(3):
                model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    assert len(recorded(script).calls) == 1


def test_a_part_that_the_script_calls_itself_has_its_path_in_the_model(recorded):
    def script():
        model = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(8, 8)), "head": nn.Linear(8, 2)})
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model["encoder"](torch.randn(4, 8)).square().mean().backward()
            optimizer.step()

    assert [call.module for call in recorded(script).calls] == ["encoder", "encoder.0"]
