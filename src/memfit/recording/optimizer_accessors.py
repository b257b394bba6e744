"""The parameters, gradients, display name and own share of any optimizer."""

import sys
from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer

_ZERO_GRAD = Optimizer.zero_grad
"""PyTorch's own, before anything replaces it."""


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters that an optimizer updates, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def drop_gradients(optimizer: Optimizer) -> None:
    """Set the gradients of an optimizer's parameters to None, as ``zero_grad`` does.

    PyTorch's own method first opens a range for its profiler, which takes longer than the rest of it. An
    optimizer with a method of its own is left to that.
    """
    if type(optimizer).zero_grad is not _ZERO_GRAD or "zero_grad" in vars(optimizer):
        optimizer.zero_grad(set_to_none=True)
        return
    for parameter in parameters_of(optimizer):
        parameter.grad = None


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return what holds the state of this rank's parameters: a ZeroRedundancyOptimizer's inner optimizer.

    One that overlaps with the backward creates it after a few backwards; it is no ``Optimizer`` itself.
    """
    module = sys.modules.get("torch.distributed.optim")
    if module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer):
        inner: Optimizer = getattr(optimizer, "optim", optimizer)
        return inner
    return optimizer


def optimizer_name(optimizer: Optimizer) -> str:
    """Return an optimizer's name for messages.

    >>> import torch
    >>> optimizer_name(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    "torch's SGD"
    """
    return f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"
