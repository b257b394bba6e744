"""The check names each recomputation that differs from its forward, and no other."""

import itertools

import pytest
import torch
from torch import nn

from memfit.errors import DivergenceError
from memfit.strategies.checkpointing import Checkpointing
from support.checkpointed_blocks import MODES, Shared, compare


def test_a_cast_cached_by_autocast_is_not_a_difference():
    """The second call reuses the weight's cast; its recomputation casts again."""

    def call(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    compare(Shared(), call=call, settings=Checkpointing("block", check=True))


@MODES
def test_the_check_accepts_tensors_of_all_kinds(use_reentrant):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            empty, whole = torch.tensor([]), torch.arange(6) > 2
            y = self.inner(x)
            z = torch.complex(y, y).conj().imag * whole + y.double().half().to(torch.float8_e4m3fn).float()
            z = (2 * z).mul_(y)  # if reentrant, autograd clones first in one of the two runs
            return z.sum() + empty.sum() + torch.tensor(2.0)

    compare(nn.Sequential(Odd()), settings=Checkpointing("0", check=True, use_reentrant=use_reentrant))


@MODES
def test_the_check_names_the_operation_that_differs(use_reentrant):
    """Row 33: shapes are the same, values are not."""

    class Forgetful(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.calls = itertools.count(1)  # a number would be restored

        def forward(self, x):
            return self.inner(x * next(self.calls)).tanh()

    for check in (False, True):
        model = nn.Sequential(nn.Linear(6, 6), Forgetful())
        Checkpointing("1", check=check, use_reentrant=use_reentrant).apply(model)
        loss = model(torch.randn(4, 6)).sum()
        if not check:
            loss.backward()  # plain checkpointing does not notice
            continue
        with pytest.raises(
            DivergenceError, match=r"module 1 .*values of aten\.mul\.Tensor -> \[4, 6\] float32 differ"
        ):
            loss.backward()


def test_the_check_detects_a_single_bit():
    class Flips(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.noise = torch.zeros(4, 6)

        def forward(self, x):
            return self.inner(x + self.noise).tanh()

    model = nn.Sequential(Flips())
    Checkpointing("0", check=True).apply(model)
    x = torch.ones(4, 6)
    loss = model(x).sum()
    model[0].noise[3, 5] = 2**-23
    with pytest.raises(DivergenceError, match=r"aten\.add\.Tensor -> \[4, 6\]"):
        loss.backward()


def test_the_check_detects_other_operations():
    class Turns(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)
            self.turns = itertools.cycle((torch.sin, torch.cos))

        def forward(self, x):
            return self.inner(next(self.turns)(x))

    model = nn.Sequential(Turns())
    Checkpointing("0", check=True).apply(model)
    with pytest.raises(DivergenceError, match=r"the forward ran aten\.sin.* recomputation ran aten\.cos"):
        model(torch.ones(4, 6)).sum().backward()
