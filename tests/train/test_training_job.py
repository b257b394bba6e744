"""A job is checked like its parts passed separately."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import memfit
from memfit.errors import UsageError


def loss(model, data):
    return model(data).square().mean()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def from_job(model, optimizer=sgd, **options):
    return memfit.Engine(memfit.Job(model, optimizer, loss, **options))


def from_parts(model, optimizer=sgd, **options):
    return memfit.Engine(model, optimizer=optimizer, loss=loss, **options)


JOB_OR_PARTS = pytest.mark.parametrize("make", [from_job, from_parts])


@JOB_OR_PARTS
@pytest.mark.parametrize("norm", [-1.0, 0.0, float("nan")])
def test_a_norm_that_reverses_or_stops_training_is_refused(make, norm):
    with pytest.raises(UsageError, match=f"max_grad_norm must be None or a number above 0, not {norm!r}"):
        make(nn.Linear(4, 1), max_grad_norm=norm)


@JOB_OR_PARTS
def test_an_infinite_norm_is_reported_and_clips_nothing(make):
    models = []
    for norm in (float("inf"), None):
        torch.manual_seed(0)
        models.append(nn.Linear(4, 1))
        result = make(models[-1], max_grad_norm=norm).step(torch.ones(8, 4))
        assert (result.grad_norm is None) == (norm is None)
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize("masters", [False, True])
def test_clipping_is_pytorchs_over_the_models_parameters_whatever_the_groups(masters):
    """The last bits of a norm depend on the order in which it is summed."""

    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(width, 9) for width in (9,) * 12))
        decayed = [each for each in model.parameters() if each.ndim > 1]
        others = [each for each in model.parameters() if each.ndim == 1]
        return model, torch.optim.SGD([{"params": others}, {"params": decayed[::-1], "lr": 0.5}], lr=0.1)

    for seed in range(20):
        (plain, by_hand), (ours, optimizer) = build(seed), build(seed)
        batch = torch.randn(6, 9)
        plan = [memfit.Precision("bf16", autocast=False, master_weights=True)] if masters else []

        def loss(model, batch):
            return model(batch.to(model[0].weight.dtype)).float().square().sum()

        engine = memfit.Engine(ours, plan, optimizer=optimizer, loss=loss, max_grad_norm=0.1)
        result = engine.step(batch)
        if masters:
            gradients = copy.deepcopy(plain).bfloat16()
            loss(gradients, batch).backward()
            for to, given in zip(plain.parameters(), gradients.parameters(), strict=True):
                to.grad = given.grad.float()
        else:
            loss(plain, batch).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        by_hand.step()
        assert torch.equal(result.grad_norm_tensor, norm)
        for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(one.to(other.dtype), other)


def test_warnings_name_the_users_line():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    here = test_warnings_name_the_users_line.__code__.co_firstlineno
    with pytest.warns(UserWarning, match="BatchNorm layers") as found:
        memfit.Engine(model, memfit.Accumulation(parts_per_batch=2), optimizer=torch.optim.SGD)
    with pytest.warns(UserWarning, match="saves no memory") as then:
        memfit.apply(nn.Sequential(nn.Linear(2, 2)), memfit.Checkpointing("0"))
    places = [(Path(one.filename).name, one.lineno - here) for one in (*found, *then)]
    assert places == [("test_training_job.py", 4), ("test_training_job.py", 6)]


@JOB_OR_PARTS
def test_nothing_to_train_is_refused(make):
    with pytest.raises(UsageError, match="ReLU has no parameters to train"):
        make(nn.ReLU())


@JOB_OR_PARTS
@pytest.mark.parametrize("optimizer", ["adam", None, [torch.optim.SGD]])
def test_a_factory_that_returns_no_optimizer_is_refused(make, optimizer):
    with pytest.raises(UsageError, match="also needs optimizer="):
        make(nn.Linear(4, 1), optimizer)


@pytest.mark.parametrize("callbacks", [[memfit.ProgressBar], [memfit.ProgressBar(), memfit.Saving]])
def test_a_callback_class_instead_of_an_instance_is_refused(callbacks):
    with pytest.raises(UsageError, match="takes a list of memfit"):
        from_parts(nn.Linear(4, 1), callbacks=callbacks)
