"""The share of their activations that compiled graphs keep, as a strategy."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config

import memfit
from memfit.errors import UsageError


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch):
    monkeypatch.setitem(counters, "stats", dict.fromkeys(["unique_graphs"], 0))


def test_apply_sets_the_share_and_revert_restores_it():
    model = nn.Linear(2, 2)
    before = config.activation_memory_budget
    memfit.apply(model, memfit.Compilation(activation_memory_budget=0.25))
    assert config.activation_memory_budget == 0.25
    memfit.revert(model)
    assert config.activation_memory_budget == before == 1.0


def test_a_file_of_settings_sets_it():
    plan = memfit.configure({"compilation": {"activation_memory_budget": 0.5}}).plan
    assert plan == memfit.Plan(compilation=memfit.Compilation(0.5))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "half"])
def test_what_is_no_share_is_refused(share):
    with pytest.raises(UsageError, match="activation_memory_budget"):
        memfit.Compilation(activation_memory_budget=share)


def test_a_version_of_pytorch_without_the_setting_is_named(monkeypatch):
    monkeypatch.setattr(torch._functorch, "config", SimpleNamespace())
    with pytest.raises(UsageError, match=r"has no torch\._functorch\.config\.activation_memory_budget"):
        memfit.apply(nn.Linear(2, 2), memfit.Compilation(0.5))


def test_the_user_is_warned_if_code_was_compiled_before():
    counters["stats"]["unique_graphs"] = 1
    model = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="before the first call of the model"):
        memfit.apply(model, memfit.Compilation(0.5))
    memfit.revert(model)
