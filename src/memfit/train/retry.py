"""Beginning again when memory runs out: what a forward changes besides gradients is put back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfit.train.state import random_state, set_random_state

_ON_THE_CPU = ("DefaultCPUAllocator", "not enough memory")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on the GPU or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _ON_THE_CPU)


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
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer
