"""What is saved of an engine, by names that another engine of the same make has, too."""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memfit.strategies.mechanisms.module_patterns import unwrapped

if TYPE_CHECKING:
    from memfit.train.engine import Engine


def named(engine: "Engine") -> dict[str, nn.Parameter]:
    """Return the model's parameters, and what else the optimizer updates, as a loss's, by its place."""
    found = dict(unwrapped(engine.model).named_parameters())
    known = {id(one) for one in (*found.values(), *engine._accounts.update.masters.values())}
    for number, group in enumerate(engine.optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                found[f"param_groups[{number}][{place}]"] = parameter
    return found


def others(engine: "Engine") -> dict[str, torch.Tensor]:
    """Return what the model's ``state_dict`` leaves out: a loss's parameters, buffers that do not persist."""
    model = unwrapped(engine.model)
    known = model.state_dict().keys()
    return {name: one for name, one in (*named(engine).items(), *model.named_buffers()) if name not in known}


def groups(engine: "Engine") -> list[list[str]]:
    """Return the names of what the optimizer updates, by parameter group; of copies, their parameters'."""
    full = engine._accounts.update.masters
    name_of = {id(full.get(parameter, parameter)): name for name, parameter in named(engine).items()}
    return [[name_of[id(one)] for one in group["params"]] for group in engine.optimizer.param_groups]


def precision_of(engine: "Engine") -> dict[str, Any]:
    """Return what a window's gradients depend on, beside the loss scale: plain values."""
    precision = engine.plan.precision
    low = precision is not None and precision.autocast and precision.dtype != "fp32"
    return {
        "parameters": sorted({str(one.dtype) for one in engine.model.parameters()}),
        "autocast": precision.dtype if precision is not None and low else None,
        "master_weights": bool(engine._accounts.update.masters),
        "gradient_dtype": engine._accumulation.gradient_dtype,
    }


def steps_of(engine: "Engine") -> int:
    """Return the micro-batches of a window."""
    return engine._accumulation.gradient_accumulation_steps or 1


def class_of(thing: object) -> str:
    """Return the name of a class, with its module."""
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
