"""What is estimated: the pieces of one training step, as they travel to the ghost's process."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer


@dataclass(frozen=True)
class OptimizerCopy:
    """An optimizer as it was made: its class, what its class was given, and the parameters by group.

    Its state is not among it: a copy begins as a new optimizer does.
    """

    kind: type[Optimizer]
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]
    others: dict[str, Any]
    """Attributes that its class has beyond those of every optimizer."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> "OptimizerCopy":
        """Describe a live optimizer; nothing of it is changed."""
        every = vars(Optimizer([torch.nn.Parameter(torch.empty(0))], {}))
        # A learning rate scheduler hangs a ``step`` of its own on the object.
        others = {key: value for key, value in vars(optimizer).items() if key not in {*every, "step"}}
        return cls(type(optimizer), optimizer.defaults, optimizer.param_groups, others)

    def make(self) -> Optimizer:
        """Make the optimizer anew, on the parameters where they are now."""
        takes = inspect.signature(self.kind).parameters
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
        if anything or self.defaults.keys() <= takes.keys():
            made = self.kind(self.groups, **self.defaults)
        else:  # its defaults are not what its class takes: as unpickling would, with no state
            made = self.kind.__new__(self.kind)
            Optimizer.__init__(made, self.groups, self.defaults)
        made.__dict__.update(self.others)
        return made


@dataclass(frozen=True)
class TrainingStep:
    """One training step in pieces, and everything around it that decides memory."""

    model: torch.nn.Module
    inputs: Any
    loss: Any
    """``loss(model, inputs)``, a criterion (a module) for ``(inputs, target)``, or None."""
    optimizer: Any
    """An ``OptimizerCopy``, a function of parameters that makes one, or None."""
    steps: int
    autocast: bool
    flags: dict[str, Any]
