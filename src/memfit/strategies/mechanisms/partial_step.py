"""An optimizer's step for some of its parameters only."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import UsageError
from memfit.strategies.mechanisms.optimizer_info import optimizer_name


def expect_independent(optimizer: Optimizer, setting: str) -> None:
    """Check that an optimizer updates each parameter independently of the others.

    Raises:
        UsageError: it does not, or is not known to.
    """
    module = type(optimizer).step.__module__
    if not module.startswith(("torch.optim.", "torchao.", "bitsandbytes.")) or isinstance(
        optimizer, torch.optim.LBFGS
    ):
        raise UsageError(
            f"{setting} needs an optimizer that updates each parameter independently. memfit does not know "
            f"whether {optimizer_name(optimizer)} does so. Use an optimizer from PyTorch (except LBFGS), "
            "torchao or bitsandbytes."
        )


def step_only(optimizer: Optimizer, index: int, parameters: Iterable[nn.Parameter]) -> None:
    """Update some parameters of one group, without calling step hooks, which are for whole steps.

    The optimizer's own groups stay as they are: backward, which may call this, runs in one thread per device.
    """
    group = optimizer.param_groups[index]
    narrowed: Optimizer = object.__new__(type(optimizer))
    vars(narrowed).update(vars(optimizer), param_groups=[group | {"params": list(parameters)}])
    step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    with torch.no_grad():
        step(narrowed)
