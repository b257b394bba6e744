"""The state of an optimizer on this rank, with the indices of all parameters.

ZeRO-1's ``ZeroRedundancyOptimizer`` has an inner optimizer on each rank, for the parameters that this rank
updates. Its own ``state_dict`` first gathers the states of all ranks on one, which may not have the memory.

                     param_groups of all parameters          inner optimizer of rank 1
    index            0         1         2                   0
    parameter        weight    bias      head                bias
    state            -         here      -                   exp_avg, exp_avg_sq, step
"""

from typing import Any

from torch.optim import Optimizer

from memfit.strategies.mechanisms.optimizer_info import local_optimizer, parameters_of


def own_indices(optimizer: Optimizer) -> list[int]:
    """Return the indices, among all parameters, of those that this rank updates, in its own order."""
    index = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    return [index[id(parameter)] for parameter in parameters_of(local_optimizer(optimizer))]


def get_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` with the states of the parameters that this rank updates."""
    local = local_optimizer(optimizer)
    if local is optimizer:
        return optimizer.state_dict()
    own, state = own_indices(optimizer), local.state_dict()["state"]
    return {
        "state": {own[number]: each for number, each in state.items()},
        "param_groups": Optimizer.state_dict(optimizer)["param_groups"],
    }


def localised(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a saved ``state_dict`` that this rank's optimizer loads, with its own indices."""
    local = local_optimizer(optimizer)
    if local is optimizer:
        return saved
    groups = local.state_dict()["param_groups"]
    return {
        "state": {
            number: saved["state"][index]
            for number, index in enumerate(own_indices(optimizer))
            if index in saved["state"]
        },
        "param_groups": [
            group | {"params": own["params"]}
            for group, own in zip(saved["param_groups"], groups, strict=True)
        ],
    }


def adopt_groups(optimizer: Optimizer) -> None:
    """Give ZeRO-1's groups, as new ones, the hyperparameters that its inner optimizer has loaded."""
    local = local_optimizer(optimizer)
    if local is not optimizer:
        optimizer.param_groups = [
            loaded | {"params": group["params"]}
            for group, loaded in zip(optimizer.param_groups, local.param_groups, strict=True)
        ]
