"""The parameters and the display name of any optimizer."""

from collections.abc import Iterator

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """Yield the parameters that an optimizer updates, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def optimizer_name(optimizer: Optimizer) -> str:
    """Return an optimizer's name for messages.

    >>> import torch
    >>> optimizer_name(torch.optim.SGD([nn.Parameter(torch.zeros(1))]))
    "torch's SGD"
    """
    return f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__}"
