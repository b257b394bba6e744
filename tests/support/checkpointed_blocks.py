"""Blocks to checkpoint, and helpers that compare their training with plain training."""

import copy

import pytest
import torch
from torch import nn

from memfit.strategies.checkpointing import Checkpointing

MODES = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class DropoutBlock(nn.Module):
    """A block with a norm, dropout, an in-place operation, and arguments of all kinds."""

    def __init__(self, width=6, norm=None):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.norm = norm or nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x, scale=None, *, extra=None):
        y = self.dropout(self.norm(self.inner(x)).relu_())
        if scale is not None:
            y = y * scale
        return y + (0 if extra is None else extra["shift"])


class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def net(norm=None, layers=3):
    torch.manual_seed(1)
    return Net([DropoutBlock(norm=norm and norm()) for _ in range(layers)]).train()


def train(model, *inputs, steps=2, call=None, backwards=1):
    """Train, and return the results: state, gradients, loss, and the state of the random numbers."""
    torch.manual_seed(2)
    inputs = inputs or (torch.randn(8, 6),)
    for _ in range(steps):
        model.zero_grad()
        loss = (call or (lambda m, *x: m(*x)))(model, *inputs).square().mean()
        for number in range(backwards):
            loss.backward(retain_graph=number < backwards - 1)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {
        "state": dict(model.state_dict()),
        "grads": grads,
        "loss": loss.detach(),
        "rng": torch.get_rng_state(),
    }


def assert_same(left, right):
    for kind in ("loss", "rng"):
        assert torch.equal(left[kind], right[kind]), kind
    for kind in ("state", "grads"):
        assert left[kind].keys() == right[kind].keys()
        for name, value in left[kind].items():
            same = value is right[kind][name] is None or torch.equal(value, right[kind][name])
            assert same, f"{kind} {name}"


def compare(model, *inputs, settings=None, **options):
    """Assert that training the checkpointed model equals plain training of a copy."""
    plain = train(copy.deepcopy(model), *inputs, **options)
    revert = (settings or Checkpointing("layers.*")).apply(model)
    assert_same(plain, train(model, *inputs, **options))
    revert()


class Ema(nn.Module):
    """A norm that replaces its buffers instead of writing to them, and uses their values in its output."""

    def __init__(self, width=6):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("never", torch.ones(width))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.calls += 1
        return (x - self.mean) / self.calls * self.never


class OwnStatistics(nn.Module):
    """A custom norm whose buffers are written by a kernel that does not increment their versions."""

    def __init__(self, width=6):
        super().__init__()
        self.register_buffer("a", torch.zeros(width))
        self.register_buffer("b", torch.ones(width))

    def forward(self, x):
        return nn.functional.batch_norm(x, self.a, self.b, training=True) + self.a


NORMS = {
    "statistics of one's own": OwnStatistics,
    "BatchNorm": lambda: nn.BatchNorm1d(6),
    "BatchNorm, cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "replaced buffers": Ema,
}


class Shared(nn.Module):
    """A model that calls one block twice and ties two weights."""

    def __init__(self, norm=None):
        super().__init__()
        self.block = DropoutBlock(norm=norm)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.block.inner.weight

    def forward(self, x):
        return self.head(self.block(self.block(x)))


def differentiated_twice(model):
    """Return the gradients of the gradient of a model's input."""
    x = torch.linspace(-1, 1, 12).reshape(2, 6).requires_grad_()
    torch.manual_seed(3)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return [each.grad for each in (x, *model.parameters())]
