"""Copies of all that a step changes, made before it: to undo a step that ran out of memory.

forward, backward     random numbers and buffers: StepSnapshots
update                parameters and optimizer state, copied to the host: OptimizerBackup
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
)

from memfit.random_state import get_random_state, set_random_state
from memfit.recording.optimizer_accessors import local_optimizer, parameters_of
from memfit.strategies.mechanisms.inspect_tensors import inner_tensors, tensor_version
from memfit.user_lines import warn_user

BufferSlot = tuple[nn.Module, str, torch.Tensor | None, Any, Any]
"""A module, the name of one of its own buffers, the buffer, and its shape and dtype when it was found."""


@dataclass(frozen=True, slots=True)
class StepSnapshot:
    """Random numbers and a model's buffers before a step: running means, counters and others."""

    model: nn.Module
    random: dict[str, Any]
    slots: list[BufferSlot]
    contents: dict[int, torch.Tensor]
    """Copies of the buffers that a step may write to, by their place in ``slots``."""
    versions: dict[int, int]
    """Versions of the buffers that are compared after the step, by their place in ``slots``."""

    @property
    def lost(self) -> str:
        """Names of the buffers that were written to and have no copy; empty if there are none."""
        unknown = self.versions.keys() - self.contents.keys()
        written = [
            self.slots[place][1]
            for place in sorted(unknown)
            if tensor_version(self.slots[place][2]) != self.versions[place]
        ]
        known = {slot[:2] for slot in self.slots}
        added = [name for module, name, *_ in _buffers(self.model) if (module, name) not in known]
        return ", ".join(written + added)

    def restore(self) -> None:
        """Restore everything in place."""
        set_random_state(self.random)
        if self.lost:
            warn_user(
                f"The failed step was undone, except for the buffers {self.lost}. These keep the values that "
                "the failed step wrote. memfit backs up only buffers that an earlier step has changed.",
            )
        with torch.no_grad():
            for place, (module, name, tensor, *_) in enumerate(self.slots):
                content = self.contents.get(place)
                # The first step's copies include masks, which may be expanded and cannot be written to.
                if tensor is not None and content is not None and not _is_same(tensor, content):
                    tensor.copy_(content)
                module._buffers[name] = tensor  # a forward may have replaced it


class StepSnapshots:
    """Takes a snapshot before each step of a model, and learns which buffers its steps write to.

    The first snapshot copies all buffers to the host; later ones copy only those that steps write to, on
    their device: masks and tables cost nothing. Searching the model for buffers takes as long as copying,
    so it is searched again only after modules or buffers were registered anywhere, or a buffer was replaced.
    """

    def __init__(self, model: nn.Module) -> None:
        _count_registrations()
        self._model = model
        self._written: set[tuple[nn.Module, str]] | None = None
        self._slots: list[BufferSlot] = []
        self._registered: int | None = None  # when the slots were found
        self._copies: dict[int, torch.Tensor] = {}
        self._groups: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
        self._watched: list[int] = []

    def take(self) -> StepSnapshot:
        """Take a snapshot; the copies in the previous one are overwritten."""
        if not self._is_current():
            self._find_buffers()
        if self._groups:
            with torch.no_grad():
                for copies, buffers in self._groups:
                    torch._foreach_copy_(copies, buffers)
        versions = {place: tensor_version(self._slots[place][2]) for place in self._watched}
        return StepSnapshot(self._model, get_random_state(), self._slots, self._copies, versions)

    def record_writes(self, snapshot: StepSnapshot) -> None:
        """Record which buffers the step after a snapshot wrote to."""
        first = self._written is None
        written = {
            snapshot.slots[place][:2]
            for place, before in snapshot.versions.items()
            # Kernels may write without counting a version. Compared once only: it waits for the device.
            if tensor_version(snapshot.slots[place][2]) != before
            or (first and not _is_same(snapshot.slots[place][2], snapshot.contents.get(place)))
        }
        if first or written:
            self._written = (self._written or set()) | written
            self._registered = None

    def _is_current(self) -> bool:
        """Return whether the model still has the buffers that were found, and in the same form."""
        if self._registered != _registrations[0]:
            return False
        for module, name, buffer, shape, dtype in self._slots:
            if module._buffers.get(name) is not buffer:
                return False
            if buffer is not None and (buffer.shape != shape or buffer.dtype is not dtype):
                return False
        return True

    def _find_buffers(self) -> None:
        """Find the model's buffers, and make room for the copies of those that steps write to."""
        self._registered, self._copies, self._groups = None, {}, []  # until everything below has succeeded
        registered, self._slots = _registrations[0], list(_buffers(self._model))
        written = self._written
        copied = {
            place: buffer
            for place, (module, name, buffer, *_) in enumerate(self._slots)
            # Batch normalization's kernels write without counting, and begin to when evaluation ends.
            if buffer is not None
            and (written is None or isinstance(module, _NormBase) or (module, name) in written)
        }
        self._watched = [place for place in range(len(self._slots)) if written is None or place not in copied]
        if written is None:
            self._copies = {place: buffer.detach().to("cpu", copy=True) for place, buffer in copied.items()}
            return  # to search again after the step, which shows what it writes to
        self._copies = {place: buffer.detach().clone() for place, buffer in copied.items()}
        self._groups = _groups([(self._copies[place], buffer) for place, buffer in copied.items()])
        self._registered = registered


def _groups(
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Return tensors and their sources in as few groups as possible, each for one operation.

    On a GPU the tensors of a group need the same dtype to be copied by one kernel.
    """
    groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for target, source in pairs:
        kind = source.device if source.is_cpu else (source.device, source.dtype)
        targets, sources = groups.setdefault(kind, ([], []))
        targets.append(target)
        sources.append(source)
    return list(groups.values())


def _is_same(tensor: torch.Tensor | None, content: torch.Tensor | None) -> bool:
    if tensor is None or content is None:
        return True
    if tensor.layout is not torch.strided or tensor.dtype is not content.dtype:
        return False
    return torch.equal(tensor.detach().cpu(), content.cpu())


def _buffers(model: nn.Module) -> Iterator[BufferSlot]:
    # Like model.modules(), which takes a microsecond more per module: this runs before each step.
    modules, seen = [model], {model}
    for module in modules:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
        for name, buffer in module._buffers.items():
            yield module, name, buffer, getattr(buffer, "shape", None), getattr(buffer, "dtype", None)


_registrations: list[int] = []
"""How often modules and buffers were registered in this process since the first engine; empty before."""


def _count_registrations() -> None:
    """Begin to count registrations, if that has not begun."""
    if not _registrations:
        _registrations.append(0)
        register_module_module_registration_hook(_count_registration)
        register_module_buffer_registration_hook(_count_registration)


def _count_registration(*_: Any) -> None:
    _registrations[0] += 1


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
        self._state = local_optimizer(optimizer).state
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
