"""What is asked of any optimizer."""

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield what an optimizer updates, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def name_of(optimizer: Optimizer) -> str:
    """Return what an optimizer is called in messages.

    >>> import torch
    >>> name_of(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    "torch's SGD"
    """
    return f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"
