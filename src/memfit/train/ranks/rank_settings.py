"""The settings of an engine that all ranks must share, by the names under which a user passes them."""

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn

from memfit.strategies.plan import Plan


def engine_settings_as_text(model: nn.Module, plan: Plan, options: dict[str, Any]) -> dict[str, str]:
    """Return the options of an engine, the settings of its plan, and the parameters of its model."""
    found = {name: _written(value) for name, value in options.items()}
    for strategy in plan.strategies():
        for field in fields(strategy):
            value = getattr(strategy, field.name)
            if value is not None:
                found[f"{type(strategy).__name__}.{field.name}"] = _written(value)
    for name, parameter in model.named_parameters():
        trains = "trainable" if parameter.requires_grad else "frozen"
        found[f"the parameter {name!r}"] = f"{tuple(parameter.shape)}, {parameter.dtype}, {trains}"
    return found


def optimizer_settings_as_text(optimizer: torch.optim.Optimizer, scheduler: Any) -> dict[str, str]:
    """Return the class of an optimizer, the settings of its groups, and the class of its scheduler."""
    found = {"the optimizer": type(optimizer).__name__, "the scheduler": type(scheduler).__name__}
    for number, group in enumerate(optimizer.param_groups):
        elements = sum(each.numel() for each in group["params"])
        found[f"optimizer.param_groups[{number}]"] = (
            f"{len(group['params'])} parameters of {elements} elements"
        )
        found |= {_entry(number, name): _written(value) for name, value in group.items() if name != "params"}
    return found


def learning_rates_as_text(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the learning rates of the groups that have one."""
    return {
        _entry(number, "lr"): _written(group["lr"])
        for number, group in enumerate(optimizer.param_groups)
        if "lr" in group
    }


def _entry(number: int, name: str) -> str:
    return f"optimizer.param_groups[{number}][{name!r}]"


def _written(value: Any) -> str:
    """Return a value as text; of objects only the class, because a ``repr`` may differ between processes."""
    if isinstance(value, torch.Tensor):
        # Reading a value on a GPU would wait for it.
        return repr(value.tolist()) if value.is_cpu else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_written, value))})"
    if isinstance(value, bool | int | float | str | None) or is_dataclass(value):
        return repr(value)
    return type(value).__name__
