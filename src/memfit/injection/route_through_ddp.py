"""Have calls of a model go through a DistributedDataParallel that the script does not see.

It reduces the gradients that the model's parameters needed when it was created, and waits for each. Where the
script freezes, unfreezes or replaces a layer later, another takes its place.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from memfit.strategies.mechanisms.module_patterns import class_name

_UNFINISHED = "Expected to have finished reduction in the prior iteration"
"""What DistributedDataParallel says then (torch/csrc/distributed/c10d/reducer.cpp, PyTorch 2.14.1)."""


def route_through_ddp(
    model: nn.Module,
    sharded: Any,
    again: Callable[[nn.Module], nn.Module],
    end: Callable[[str], NoReturn],
    mode: str,
) -> None:
    """Have calls of a model go through its DistributedDataParallel.

    ``_compiled_call_impl`` is where PyTorch keeps another way to call a module: copies and pickles of the
    module do not have it (torch/nn/modules/module.py, 2.14.1).

    Args:
        model: which the script calls.
        sharded: the model in a DistributedDataParallel.
        again: returns the model in another.
        end: called with the reason if a step does not suit it; raises.
        mode: of the sharding.
    """
    own = model._compiled_call_impl or model._call_impl
    inside, reduced = False, _needing_gradients(model)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside, sharded, reduced
        if inside:
            return own(*args, **kwargs)
        needed = _needing_gradients(model) if torch.is_grad_enabled() else {}
        if needed and needed.keys() != reduced.keys():
            sharded._remove_autograd_hooks()
            sharded, reduced = again(model), needed
        inside = True
        try:
            return sharded(*args, **kwargs)
        except RuntimeError as error:
            if _UNFINISHED in str(error):
                end(
                    f"sharding: a step used not all parameters of {class_name(model)}, and "
                    "DistributedDataParallel waits for the gradient of each. Write "
                    f'"sharding": {{"mode": "{mode}", "find_unused_parameters": true}} in the plan.'
                )
            raise
        finally:
            inside = False

    model.__dict__["_compiled_call_impl"] = call  # torch.compile's wrapper passes attributes on


def _needing_gradients(model: nn.Module) -> dict[int, nn.Parameter]:
    return {id(each): each for each in model.parameters() if each.requires_grad}
