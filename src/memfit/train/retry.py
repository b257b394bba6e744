"""Beginning again when memory runs out: what was changed is put back.

forward, backward    random numbers and buffers      Moment, kept where they are: small
optimizer.step       parameters, optimizer state     Backup, on the host: made only where it may be needed
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.strategies.mechanisms.optimizers import parameters_of
from memfit.train.states.state import random_state, set_random_state

_WORDS = (
    *("DefaultCPUAllocator", "not enough memory"),  # of the CPU's allocator
    *("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
)


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception, or what caused it, says that memory ran out, on the GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS):
        return True
    return error.__cause__ is not None and out_of_memory(error.__cause__)


@dataclass(frozen=True, slots=True)
class Moment:
    """Where random numbers and a model's buffers stood: running means, counters, and whatever else."""

    random: dict[str, Any]
    buffers: tuple[tuple[nn.Module, str, torch.Tensor, torch.Tensor], ...]
    """Module, name, the buffer itself, and what was in it."""

    @classmethod
    def of(cls, model: nn.Module) -> "Moment":
        """Note how things stand."""
        return cls(random_state(), tuple((*place, place[2].clone()) for place in _buffers(model)))

    def restore(self) -> None:
        """Put all back, in place."""
        set_random_state(self.random)
        with torch.no_grad():
            for module, name, buffer, content in self.buffers:
                buffer.copy_(content)
                module._buffers[name] = buffer  # a forward may have put another there


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    # As model.modules() does, which takes a microsecond a module more: this is done before each step.
    modules, seen = [model], {model}
    for module in modules:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


class Backup:
    """Parameters and all that an optimizer and its scheduler keep, copied to the host; and other tensors."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: Any = None, others: Iterable[torch.Tensor] = ()
    ) -> None:
        self._scheduler = scheduler
        self._scheduled = None if scheduler is None else copy.deepcopy(scheduler.state_dict())
        self._state = optimizer.state
        self._known = dict(optimizer.state)
        dicts = [*optimizer.param_groups, *optimizer.state.values()]
        self._tensors = [_keep(one) for one in (*parameters_of(optimizer), *others)]
        self._dicts = [
            (entries, {name: _keep(value) for name, value in entries.items() if name != "params"})
            for entries in dicts
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, in place; what is new is gone."""
        for put_back in self._tensors:
            put_back()
        for key in self._state.keys() - self._known.keys():
            del self._state[key]
        for entries, kept in self._dicts:
            for name in entries.keys() - kept.keys() - {"params"}:
                del entries[name]
            entries.update({name: put_back() for name, put_back in kept.items()})
        if self._scheduled is not None:
            self._scheduler.load_state_dict(self._scheduled)


def _keep(value: Any) -> Callable[[], Any]:
    """Copy a value; return what gives it back as it was."""
    if not isinstance(value, torch.Tensor):
        copied = copy.deepcopy(value)
        return lambda: copied
    contents = [(part, part.detach().to("cpu", copy=True)) for part in parts_of(value)]

    def put_back() -> torch.Tensor:
        for part, content in contents:
            part.detach().copy_(content)
        return value

    return put_back


def parts_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the plain tensors that a tensor is made of.

    Quantised state is of several, and a copy of the whole may not be one: torchao's ``to`` shares them on the
    same device.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from parts_of(getattr(tensor, name))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that shares nothing, of one that is made of several, too."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.detach().clone()
    names, context = tensor.__tensor_flatten__()
    inner = {name: copy_of(getattr(tensor, name)) for name in names}
    whole: torch.Tensor = type(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
    return whole
