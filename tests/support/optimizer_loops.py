"""A small model, and loops that train it, for tests of optimizers."""

import torch
from torch import nn

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "RMSprop": {"centered": True},
    "Adagrad": {},
    "Adadelta": {},
    "ASGD": {},
    "NAdam": {},
    "Rprop": {},
    "RAdam": {"foreach": True},
    "Adafactor": {},
}
"""Optimizers of PyTorch's that update each parameter by itself, and arguments that they are tried with."""


def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


def groups(model):
    """Return two parameter groups with different settings."""
    weights = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    biases = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.01, "weight_decay": 0.0}]


def loss_of(model, seed):
    return model(torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))).square().mean()


def train(model, optimizer, steps=5, scheduler=None, first=0):
    for seed in range(first, first + steps):
        loss_of(model, seed).backward()
        optimizer.step()
        model.zero_grad()
        if scheduler is not None:
            scheduler.step()


def same(left, right):
    return all(torch.equal(*pair) for pair in zip(left.parameters(), right.parameters(), strict=True))


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def assert_equal_states(left, right):
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    for index, state in left["state"].items():
        assert state.keys() == right["state"][index].keys()
        for name, value in state.items():
            torch.testing.assert_close(value, right["state"][index][name], rtol=0, atol=0)
