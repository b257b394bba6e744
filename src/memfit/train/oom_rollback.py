"""Undo a step that ran out of memory.

forward, backward    random numbers and buffers      StepSnapshot, in place: only buffers that steps write to
optimizer.step       parameters, optimizer state     OptimizerBackup, on the host: only where it may be needed
"""

import copy
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from memfit.random_state import get_random_state, set_random_state
from memfit.strategies.mechanisms.optimizer_info import parameters_of
from memfit.strategies.mechanisms.tensors import inner_tensors, version_of
from memfit.user_frame import warn_user

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


BufferSlot = tuple[nn.Module, str, torch.Tensor | None]
"""A module, the name of one of its own buffers, and the buffer."""


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """Random numbers and a model's buffers before a step: running means, counters and others.

    Columns: a buffer's slot, its version, and a copy of its contents; None for one that steps do not write.
    """

    random: dict[str, Any]
    slots: list[BufferSlot]
    versions: list[int]
    contents: list[torch.Tensor | None]

    @property
    def lost(self) -> str:
        """Names of the buffers that were written to and have no copy; empty if there are none."""
        columns = zip(self.slots, self.versions, self.contents, strict=True)
        return ", ".join(
            name
            for (_, name, tensor), before, content in columns
            if content is None and version_of(tensor) != before
        )

    def restore(self) -> None:
        """Restore everything in place."""
        set_random_state(self.random)
        if self.lost:
            warn_user(
                f"The failed step was undone, except for the buffers {self.lost}. These keep the values that "
                "the failed step wrote. memfit backs up only buffers that an earlier step has changed.",
            )
        with torch.no_grad():
            for (module, name, tensor), content in zip(self.slots, self.contents, strict=True):
                if tensor is not None and content is not None:
                    tensor.copy_(content)
                module._buffers[name] = tensor  # a forward may have replaced it


class StepSnapshots:
    """Takes a snapshot before each step of a model, and learns which buffers its steps write to.

    The first snapshot copies all buffers to the host; later ones copy only those that steps write to, on
    their device: masks, tables and frozen weights cost nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: set[tuple[nn.Module, str]] | None = None
        self._copies = ReusedCopies()

    def take(self) -> StepSnapshot:
        """Take a snapshot."""
        slots = list(_buffers(self._model))
        contents: list[torch.Tensor | None] = [None] * len(slots)
        if self._written is None:
            contents = [
                None if buffer is None else buffer.detach().to("cpu", copy=True) for _, _, buffer in slots
            ]
        elif slots:
            chosen = {
                index: buffer
                for index, (module, name, buffer) in enumerate(slots)
                if buffer is not None and self._is_written(module, name)
            }
            for index, copied in zip(chosen, self._copies.of(list(chosen.values())), strict=True):
                contents[index] = copied
        versions = [version_of(buffer) for _, _, buffer in slots]
        return StepSnapshot(get_random_state(), slots, versions, contents)

    def record_writes(self, snapshot: StepSnapshot) -> None:
        """Record which buffers the step after a snapshot wrote to."""
        first = self._written is None
        written = self._written = self._written or set()
        for (module, name, buffer), before, content in zip(
            snapshot.slots, snapshot.versions, snapshot.contents, strict=True
        ):
            # Kernels may write without counting a version. Compared once only, since it waits for the device.
            if version_of(buffer) != before or (first and not _is_same(buffer, content)):
                written.add((module, name))

    def _is_written(self, module: nn.Module, name: str) -> bool:
        # Batch normalization's kernels write without counting, and begin to when evaluation ends.
        normalizes = isinstance(module, _NormBase) and module.training
        return normalizes or (module, name) in (self._written or ())


class ReusedCopies:
    """Repeated copies of the same tensors: by few operations, into the same memory."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._shapes: list[Any] = []
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    @torch.no_grad()
    def of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors; those of the previous call are overwritten."""
        shapes = [tensor.shape for tensor in tensors]
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if same and shapes == self._shapes:
            for targets, sources in self._groups:
                torch._foreach_copy_(targets, sources)
            return self._copies
        self._tensors, self._copies = [], []  # until all copies exist
        copies = [tensor.clone() for tensor in tensors]
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for tensor, copied in zip(tensors, copies, strict=True):
            targets, sources = groups.setdefault((tensor.dtype, tensor.device), ([], []))
            targets.append(copied)
            sources.append(tensor)
        self._groups, self._shapes = list(groups.values()), shapes
        self._copies, self._tensors = copies, tensors
        return copies


def _is_same(tensor: torch.Tensor | None, content: torch.Tensor | None) -> bool:
    if tensor is None or content is None:
        return True
    return tensor.layout is torch.strided and torch.equal(tensor.detach().cpu(), content)


def _buffers(model: nn.Module) -> Iterator[BufferSlot]:
    # Like model.modules(), which takes a microsecond more per module: this runs before each step.
    modules, seen = [model], {model}
    for module in modules:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
        for name, buffer in module._buffers.items():
            yield module, name, buffer


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
        self._state = optimizer.state
        self._known = dict(optimizer.state)
        dicts = [*optimizer.param_groups, *optimizer.state.values()]
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
