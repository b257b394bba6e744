"""Plans on models, on copies and parts of them, and on models without parameters."""

import copy

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.apply import apply, revert
from memfit.strategies.checkpointing import Checkpointing
from memfit.strategies.precision import Precision, autocast_of_model


def net():
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


@pytest.mark.parametrize("settings", [Precision("bf16"), Checkpointing("*")])
def test_a_copy_of_a_model_with_a_plan_is_neither_reverted_nor_changed_twice(settings):
    model = net()
    copied = copy.deepcopy(apply(model, settings))
    with pytest.raises(UsageError, match=r"cannot be reverted: .* a copy"):
        revert(copied)
    with pytest.raises(UsageError, match=r"cannot be given a plan: .* a copy"):
        apply(copied, Precision("fp16"))
    assert copied(torch.ones(2, 4)).dtype is model(torch.ones(2, 4)).dtype
    assert apply(copy.deepcopy(revert(model)), settings)


def test_a_part_of_a_model_with_a_plan_cannot_get_another():
    model = apply(net(), Checkpointing("*"))
    with pytest.raises(UsageError, match="cannot be given a plan: it contains the wrappers of a plan"):
        apply(model[0], Precision("bf16"))


def test_what_a_data_parallel_over_one_gpu_calls_gets_the_plan():
    parallel = nn.DataParallel(nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.GELU()) for _ in range(2))))
    inputs = torch.ones(3, 2)
    before = parallel(inputs)
    assert apply(parallel, Checkpointing("0")) is parallel
    assert torch.equal(parallel(inputs), before)
    with pytest.raises(UsageError, match="already"):
        apply(parallel.module, Checkpointing("1"))
    assert revert(parallel) is parallel
    apply(parallel.module, Checkpointing("1"))


def test_revert_without_a_plan_does_nothing():
    model = net()
    assert revert(revert(model)) is model


def test_a_model_without_parameters_runs_on_the_cpu():
    with autocast_of_model(Precision("bf16"), nn.Identity()):
        assert torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (Precision("fp16", loss_scale=512.0), "loss_scale"),
        (Precision("fp16", loss_scale={"init_scale": 8.0}), "loss_scale"),
        (Precision("bf16", autocast=False, master_weights=True), "master_weights"),
        (Precision("fp16", autocast=False, master_weights=True), "master_weights"),
    ],
)
def test_settings_of_the_training_loop_are_refused(settings, name):
    model = net()
    with pytest.raises(UsageError, match=f"cannot use {name}, which applies to the training loop"):
        apply(model, settings)
    assert model[0][0].weight.dtype == torch.float32
    assert apply(model, Precision("fp16")), "the loop has its own scaler"
