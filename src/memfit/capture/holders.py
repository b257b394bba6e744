"""Which live objects hold an allocation: parameters, buffers, gradients, optimizer state.

Objects are asked at the moments when they are all there (gradients just before an optimizer steps,
its state just after), and only the addresses of their storages are kept. Which allocation an address
meant at that moment is settled from the history afterwards.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from memfit.capture.modules import tensors_in
from memfit.ghost.known import storage_start
from memfit.records import Category

Held = tuple[int, Category, tuple[int, ...]]
"""(serial, category, storage addresses): at that serial, those allocations were of that category."""


def addresses(tensors: Iterable[object]) -> tuple[int, ...]:
    """Return the storage addresses of the CUDA tensors among some objects."""
    found = (_address(_local(tensor)) for tensor in tensors)
    return tuple(address for address in found if address)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that an optimizer updates."""
    for group in optimizer.param_groups:
        yield from group["params"]


def gradients_of(parameters: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the gradients that are there."""
    for parameter in parameters:
        gradient = parameter.grad if parameter.is_leaf else None
        if gradient is not None:
            yield gradient


def state_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state, however nested."""
    for state in optimizer.state.values():
        yield from tensors_in(state)


def module_tensors(modules: Iterable[torch.nn.Module]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the parameters and the buffers of some modules."""
    parameters: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    for module in modules:
        parameters += module.parameters()
        buffers += module.buffers()
    return parameters, buffers


def _address(tensor: object) -> int:
    """Return where a tensor's memory begins; 0 if it is on the CPU, sparse, or a stand-in for others."""
    if not isinstance(tensor, torch.Tensor) or not tensor.is_cuda or tensor.layout is not torch.strided:
        return 0
    try:
        return storage_start(tensor)
    except RuntimeError:  # under torch.func parameters are wrappers; NotImplementedError is one
        return 0


def _local(tensor: Any) -> Any:
    """Return this rank's piece of a DTensor, and anything else as it is."""
    return getattr(tensor, "_local_tensor", tensor)
