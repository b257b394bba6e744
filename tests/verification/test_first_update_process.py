"""What is collected until a script's first update."""

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memfit.patching.installed_hooks import InstalledHooks
from memfit.verification import first_update_process
from memfit.verification.first_update_process import (
    FirstUpdateReached,
    FirstUpdateRunSettings,
    FirstUpdateWatcher,
    read_first_update,
)


@pytest.fixture
def watched(tmp_path):
    """Watch this process as that of a script."""
    hooks, update = (
        InstalledHooks(),
        FirstUpdateWatcher(FirstUpdateRunSettings(str(tmp_path), False, True, True)),
    )
    hooks.call_after(first_update_process._OPTIMIZER, "__init__", update.created)
    hooks.wrap(first_update_process._MODULE, "__call__", update.called)
    hooks.add(register_optimizer_step_pre_hook(update.steps))
    yield lambda: read_first_update(tmp_path)
    hooks.remove()


def test_two_models_whose_parameters_have_the_same_names_are_told_apart(watched):
    first, second = (nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters()) for each in (first, second)]
    second(first(torch.ones(1, 2))).sum().backward()
    optimizers[0].step()
    with pytest.raises(FirstUpdateReached):
        optimizers[1].step()
    names = [each.name for each in watched().gradients]
    assert names == ["0.weight", "0.bias", "0.weight of model 2", "0.bias of model 2"]


def test_inputs_are_kept_by_call(watched):
    model = nn.Bilinear(2, 2, 1)
    optimizer = torch.optim.SGD(model.parameters())
    rows, positions = torch.arange(8.0).reshape(4, 2), torch.ones(1, 2)
    for part in rows.split(2):
        model(part, positions.expand(2, 2)).sum().backward()
    with pytest.raises(FirstUpdateReached):
        optimizer.step()
    first, shared, second, again = watched().inputs
    assert [each.shape for each in (first, second)] == [(2, 2)] * 2
    assert first != second
    assert shared == again


@pytest.mark.parametrize(
    ("kinds", "coarsest"),
    [
        ((torch.float64,), "float64"),
        ((torch.float64, torch.float32), "float32"),
        ((torch.float32, torch.bfloat16), "bfloat16"),
    ],
)
def test_the_coarsest_precision_counts(watched, kinds, coarsest):
    models = [nn.Linear(2, 2, dtype=kind) for kind in kinds]
    optimizer = torch.optim.SGD([each for model in models for each in model.parameters()])
    for model, kind in zip(models, kinds, strict=True):
        model(torch.ones(1, 2, dtype=kind)).sum().backward()
    with pytest.raises(FirstUpdateReached):
        optimizer.step()
    assert watched().arithmetic == coarsest
