"""Undo an update that ran out of memory: parameters and optimizer state, copied to the host beforehand."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from memfit.strategies.mechanisms.optimizer_info import parameters_of, state_of
from memfit.strategies.mechanisms.tensors import inner_tensors

_MESSAGES = (
    *("DefaultCPUAllocator", "not enough memory"),  # of the CPU's allocator
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception or its cause reports that the GPU or the CPU is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)


class OptimizerBackup:
    """Copies on the host: parameters, the state of an optimizer and its scheduler, and other tensors.

    Args:
        optimizer, scheduler, others: what to copy.
        value_of: returns the memory of a parameter's value, if that may be elsewhere than the parameter.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        others: Iterable[torch.Tensor] = (),
        value_of: Callable[[nn.Parameter], torch.Tensor] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._scheduled = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self._state = state_of(optimizer)
        self._known = dict(self._state)
        dicts = [*optimizer.param_groups, *self._state.values()]
        self._tensors = [_backup(parameter, value_of or _itself) for parameter in parameters_of(optimizer)]
        self._tensors += [_backup(other) for other in others]
        self._dicts = [
            (entries, {name: _backup(value) for name, value in entries.items() if name != "params"})
            for entries in dicts
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore everything in place; remove entries that are new."""
        for restore in self._tensors:
            restore()
        for key in self._state.keys() - self._known.keys():
            del self._state[key]
        for entries, kept in self._dicts:
            for name in entries.keys() - kept.keys() - {"params"}:
                del entries[name]
            entries.update({name: restore() for name, restore in kept.items()})
        if self._scheduled is not None:
            self._scheduler.load_state_dict(self._scheduled)


def _itself(value: Any) -> Any:
    return value


def _backup(value: Any, memory_of: Callable[[Any], torch.Tensor] = _itself) -> Callable[[], Any]:
    """Copy a value; return a function that restores and returns it."""
    if not isinstance(value, torch.Tensor):
        copied = copy.deepcopy(value)
        return lambda: copied
    contents = [part.detach().to("cpu", copy=True) for part in inner_tensors(memory_of(value))]

    def restore() -> Any:
        for part, content in zip(inner_tensors(memory_of(value)), contents, strict=True):
            part.detach().copy_(content)
        return value

    return restore
