"""Every model, optimizer and tensor with a graph that is alive now: for a run that was not asked as it went.

Looking at all objects of the process takes tens of milliseconds: once, when memory has run out.
"""

import gc
from dataclasses import dataclass

import torch
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Living:
    """What is alive."""

    roots: tuple[torch.nn.Module, ...]
    """Modules that no other module holds."""
    optimizers: tuple[Optimizer, ...]
    differentiable: tuple[torch.Tensor, ...]
    """Tensors that a graph leads back from."""
    others: tuple[torch.Tensor, ...]


def living() -> Living:
    """Find what is alive; objects that ``gc.freeze`` was called on cannot be found."""
    modules: list[torch.nn.Module] = []
    optimizers: list[Optimizer] = []
    tensors: list[torch.Tensor] = []
    for candidate in gc.get_objects():
        kind = type(candidate)  # isinstance asks the object, and proxies answer for others
        if issubclass(kind, torch.nn.Module):
            modules.append(candidate)
        elif issubclass(kind, Optimizer):
            optimizers.append(candidate)
        elif issubclass(kind, torch.Tensor):
            tensors.append(candidate)
    held = {id(child) for module in modules for child in _children(module)}
    with torch._C.DisableTorchFunctionSubclass():  # of tensors that are more, nothing of theirs is run
        differentiable = tuple(tensor for tensor in tensors if tensor.grad_fn is not None)
        others = tuple(tensor for tensor in tensors if tensor.grad_fn is None)
    roots = tuple(module for module in modules if id(module) not in held)
    return Living(roots, tuple(optimizers), differentiable, others)


def _children(module: torch.nn.Module) -> tuple[torch.nn.Module | None, ...]:
    # One that is being built, and that super().__init__() was not called of yet, has none.
    return tuple(vars(module).get("_modules", {}).values())
