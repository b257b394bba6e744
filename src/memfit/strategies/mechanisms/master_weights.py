"""Float32 copies of low-precision parameters, which the optimizer updates and memfit rounds into the model.

    gradient sums (float32) ──> master.grad ──optimizer──> master ──rounded──> parameter (bf16, fp16)

An optimizer refuses gradients of another dtype than its parameters, and updates smaller than a bf16
parameter's last digit are lost: hence the copies.
"""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn


def float32_copies(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
    """Copy trainable parameters in float32; call this before they are cast."""
    return {
        parameter: nn.Parameter(parameter.detach().to(torch.float32, copy=True))
        for parameter in parameters
        if parameter.requires_grad and parameter.is_floating_point()
    }


def replace_optimizer_parameters(
    optimizer: torch.optim.Optimizer, replacements: Mapping[nn.Parameter, nn.Parameter]
) -> None:
    """Have an optimizer update the values of ``replacements`` in place of its keys, with their state."""
    for group in optimizer.param_groups:
        group["params"] = [replacements.get(parameter, parameter) for parameter in group["params"]]
    for parameter, replacement in replacements.items():
        if parameter in optimizer.state:
            optimizer.state[replacement] = optimizer.state.pop(parameter)


@torch.no_grad()
def round_copies_into_parameters(masters: Mapping[nn.Parameter, torch.Tensor]) -> None:
    """Round every float32 copy into its parameter."""
    if masters:
        torch._foreach_copy_(list(masters), list(masters.values()))


def function_to_round_into_parameters(
    masters: Mapping[nn.Parameter, nn.Parameter],
) -> Callable[[list[nn.Parameter]], None]:
    """Return a function that rounds some of the copies into their parameters."""
    parameter_of = {master: parameter for parameter, master in masters.items()}
    return lambda updated: round_copies_into_parameters({parameter_of[each]: each for each in updated})


@torch.no_grad()
def load_float32_copies(
    masters: Mapping[nn.Parameter, torch.Tensor], values: dict[nn.Parameter, torch.Tensor]
) -> None:
    """Set float32 copies and their parameters."""
    for parameter, master in masters.items():
        master.copy_(values[parameter])
    round_copies_into_parameters(masters)
