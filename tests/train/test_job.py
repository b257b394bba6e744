"""A job is checked like its parts passed separately."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

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


@JOB_OR_PARTS
def test_several_ranks_are_refused(make):
    model = DistributedDataParallel.__new__(DistributedDataParallel)  # the constructor needs ranks
    nn.Module.__init__(model)
    model.module = nn.Linear(4, 1)
    with pytest.raises(UsageError, match="trains on one GPU"):
        make(model)


@JOB_OR_PARTS
def test_nothing_to_train_is_refused(make):
    with pytest.raises(UsageError, match="ReLU has no parameters to train"):
        make(nn.ReLU())


@JOB_OR_PARTS
@pytest.mark.parametrize("optimizer", ["adam", None, [torch.optim.SGD]])
def test_a_factory_that_returns_no_optimizer_is_refused(make, optimizer):
    with pytest.raises(UsageError, match="also needs optimizer="):
        make(nn.Linear(4, 1), optimizer)


@pytest.mark.parametrize("callbacks", [[memfit.ProgressBar], [memfit.EarlyStopping(), memfit.Saving]])
def test_a_callback_class_instead_of_an_instance_is_refused(callbacks):
    with pytest.raises(UsageError, match="takes a list of memfit"):
        from_parts(nn.Linear(4, 1), callbacks=callbacks)
