"""Tensors whose gradients reentrant checkpointing would lose are refused or warned about."""

import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.checkpointing import Checkpointing
from support.checkpointed_blocks import assert_same, compare, train


@dataclass
class Output:
    hidden: torch.Tensor


class Returns(nn.Module):
    """A block that returns an object of a type unknown to pytree."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        return Output(self.inner(x).tanh())


class Takes(nn.Module):
    """A block that takes an object of a type unknown to pytree."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, output):
        return self.inner(output.hidden).tanh()


def through_objects():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), Returns(), Takes())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("1", r"1 cannot .* its forward returns an object of type Output that contains"),
        ("2", r"2 cannot .* its forward is passed an object of type Output that"),
    ],
)
def test_an_object_with_tensors_is_refused_if_their_gradients_would_be_lost(name, words):
    model = through_objects()
    revert = Checkpointing(name, use_reentrant=True).apply(model)
    with pytest.raises(UsageError, match=words):
        model(torch.ones(4, 6))
    revert()
    compare(model, settings=Checkpointing(name))


def test_an_object_with_tensors_without_gradients_may_be_passed():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x, mask):
            return self.inner(x * mask.hidden)

    model = nn.Sequential(Masked())
    mask = Output(torch.rand(6))
    compare(
        model,
        torch.ones(4, 6),
        settings=Checkpointing("0", use_reentrant=True),
        call=lambda model, x: model[0](x, mask),
    )


class Routed(nn.Module):
    """A block that stores a loss in an attribute, like mixture-of-experts routers."""

    def __init__(self):
        super().__init__()
        self.router, self.inner = nn.Linear(6, 4), nn.Linear(6, 6)

    def forward(self, x):
        self.balance = self.router(x).softmax(-1).square().mean()
        return x + self.inner(x).tanh()


def balanced(model, x):
    return model(x) + sum(layer.balance for layer in model)


def routed():
    torch.manual_seed(1)
    return nn.Sequential(Routed(), Routed())


def test_a_loss_stored_in_an_attribute_is_warned_about():
    model = routed()
    Checkpointing("0", use_reentrant=True).apply(model)
    with pytest.warns(UserWarning, match=r"0 stored tensors as .* \(balance\).*Leave out use_reentrant"):
        balanced(model, torch.ones(4, 6)).sum().backward()
    assert model[0].router.weight.grad is None, "the gradient is lost, as the warning states"


def test_without_reentrant_the_gradients_exist_and_no_warning_appears():
    plain, model = train(routed(), call=balanced), routed()
    Checkpointing("*").apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(train(model, call=balanced), plain)
