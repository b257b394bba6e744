"""Blocks to be checkpointed, and runs of them to be compared with plain training."""

import copy

import pytest
import torch
from torch import nn

from memfit.strategies.checkpointing import Checkpointing

MODES = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


class Block(nn.Module):
    """What blocks have: norm, dropout, an in-place operation, arguments of all kinds."""

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
    return Net([Block(norm=norm and norm()) for _ in range(layers)]).train()


def train(model, *inputs, steps=2, call=None, backwards=1):
    """Take steps, and return all that they leave: state, gradients, loss, random numbers."""
    torch.manual_seed(2)
    inputs = inputs or (torch.randn(8, 6),)
    for _ in range(steps):
        model.zero_grad()
        loss = (call or (lambda m, *x: m(*x)))(model, *inputs).square().mean()
        for each in range(backwards):
            loss.backward(retain_graph=each < backwards - 1)
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {
        "state": dict(model.state_dict()),
        "grads": grads,
        "loss": loss.detach(),
        "rng": torch.get_rng_state(),
    }


def assert_same(one, other):
    for kind in ("loss", "rng"):
        assert torch.equal(one[kind], other[kind]), kind
    for kind in ("state", "grads"):
        assert one[kind].keys() == other[kind].keys()
        for name, value in one[kind].items():
            same = value is other[kind][name] is None or torch.equal(value, other[kind][name])
            assert same, f"{kind} {name}"


def compare(model, *inputs, settings=None, **options):
    """Train a copy plain and the model checkpointed; they must come to the same."""
    plain = train(copy.deepcopy(model), *inputs, **options)
    revert = (settings or Checkpointing("layers.*")).apply(model)
    assert_same(plain, train(model, *inputs, **options))
    revert()


class Ema(nn.Module):
    """Buffers that are replaced, not written to, and whose values count."""

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
    """Written to by a kernel that counts no version, in a layer that PyTorch does not know."""

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
    """One block called twice, and a weight in two places."""

    def __init__(self, norm=None):
        super().__init__()
        self.block = Block(norm=norm)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.block.inner.weight

    def forward(self, x):
        return self.head(self.block(self.block(x)))
