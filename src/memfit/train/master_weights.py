"""Float32 copies of low-precision parameters: the optimizer updates them, and rounds them into the model.

    gradient sums (float32) ──> master.grad ──optimizer──> master ──rounded──> parameter (bf16, fp16)

An optimizer refuses gradients of another dtype than its parameters, and updates smaller than a bf16
parameter's last digit vanish: hence the copies.
"""

from collections.abc import Iterable

import torch
from torch import nn


def copies(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
    """Copy parameters that are trained, in float32: to be called before they are cast."""
    return {
        parameter: nn.Parameter(parameter.detach().to(torch.float32, copy=True))
        for parameter in parameters
        if parameter.requires_grad and parameter.is_floating_point()
    }


def hand_over(optimizer: torch.optim.Optimizer, places: dict[nn.Parameter, nn.Parameter]) -> None:
    """Have an optimizer update other tensors: those of ``places`` in place of its keys, with their state."""
    for group in optimizer.param_groups:
        group["params"] = [places.get(parameter, parameter) for parameter in group["params"]]
    for parameter, other in places.items():
        if parameter in optimizer.state:
            optimizer.state[other] = optimizer.state.pop(parameter)


@torch.no_grad()
def write(masters: dict[nn.Parameter, nn.Parameter]) -> None:
    """Round every copy into its parameter."""
    if masters:
        torch._foreach_copy_(list(masters), list(masters.values()))


@torch.no_grad()
def load(masters: dict[nn.Parameter, nn.Parameter], values: dict[nn.Parameter, torch.Tensor]) -> None:
    """Set the copies, and their parameters."""
    for parameter, master in masters.items():
        master.copy_(values[parameter])
    write(masters)
