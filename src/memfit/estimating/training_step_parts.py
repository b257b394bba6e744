"""The parts of a training step to estimate, as sent to the ghost's process."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerCopy:
    """An optimizer without its state: its class, the settings passed to the class, and its parameter groups.

    A copy starts like a new optimizer.
    """

    kind: type[Optimizer]
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]
    others: dict[str, Any]
    """Attributes that its class adds to those of every optimizer."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> "OptimizerCopy":
        """Describe a live optimizer without changing it."""
        common = vars(Optimizer([torch.nn.Parameter(torch.empty(0))], {}))
        # A learning rate scheduler sets a ``step`` of its own on the object.
        others = {key: value for key, value in vars(optimizer).items() if key not in {*common, "step"}}
        return cls(type(optimizer), optimizer.defaults, optimizer.param_groups, others)

    def make(self) -> Optimizer:
        """Recreate the optimizer on the parameters at their present location."""
        takes = inspect.signature(self.kind).parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        if takes_any or self.defaults.keys() <= takes.keys():
            made = self.kind(self.groups, **self.defaults)
        else:  # its defaults are not arguments of its class: recreate it as unpickling does, without state
            made = self.kind.__new__(self.kind)
            Optimizer.__init__(made, self.groups, self.defaults)
        made.__dict__.update(self.others)
        return made


@dataclass(frozen=True)
class TrainingStep:
    """The parts of one training step, and the settings around it that affect memory."""

    model: torch.nn.Module
    inputs: Any
    loss: Any
    """``loss(model, inputs)``, a criterion (a module) for ``(inputs, target)``, or None."""
    optimizer: Any
    """An ``OptimizerCopy``, a function of parameters that makes one, or None."""
    steps: int
    autocast: bool
    flags: dict[str, Any]
