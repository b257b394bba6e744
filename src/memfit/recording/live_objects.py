"""Find every live model, optimizer and tensor, also those that were never met on the way.

Examining all objects of the process takes tens of milliseconds, so it is done a few times in a run at most.
"""

import gc
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """The objects that are alive."""

    roots: tuple[torch.nn.Module, ...]
    """Outermost modules."""
    optimizers: tuple[Optimizer, ...]
    differentiable: tuple[torch.Tensor, ...]
    """Tensors with a ``grad_fn``."""
    others: tuple[torch.Tensor, ...]
    """Tensors without one."""


def find_live_objects() -> LiveObjects:
    """Return the live objects, except those hidden by ``gc.freeze``."""
    modules: list[torch.nn.Module] = []
    optimizers: list[Optimizer] = []
    tensors: list[torch.Tensor] = []
    for candidate in gc.get_objects():
        kind = type(candidate)  # isinstance would consult __class__, with which proxies impersonate others
        if issubclass(kind, torch.nn.Module):
            modules.append(candidate)
        elif issubclass(kind, Optimizer):
            optimizers.append(candidate)
        elif issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor):  # fake: without memory
            tensors.append(candidate)
    children = {id(child) for module in modules for child in _children(module)}
    with torch._C.DisableTorchFunctionSubclass():  # run no code of tensor subclasses
        differentiable = tuple(tensor for tensor in tensors if tensor.grad_fn is not None)
        others = tuple(tensor for tensor in tensors if tensor.grad_fn is None)
    roots = tuple(module for module in modules if id(module) not in children)
    return LiveObjects(roots, tuple(optimizers), differentiable, others)


def _children(module: torch.nn.Module) -> tuple[torch.nn.Module | None, ...]:
    # A module under construction, before super().__init__(), has no _modules.
    return tuple(vars(module).get("_modules", {}).values())
