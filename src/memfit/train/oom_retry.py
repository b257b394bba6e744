"""Beginning again when memory runs out: what was changed is put back.

forward, backward    random numbers and buffers      Moment, where they are: those alone that steps write to
optimizer.step       parameters, optimizer state     Backup, on the host: made only where it may be needed
"""

import copy
import operator
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from memfit.strategies.mechanisms.forward_state import version
from memfit.strategies.mechanisms.optimizer_info import parameters_of
from memfit.train.resume.state_file import random_state, set_random_state

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


Place = tuple[nn.Module, str, torch.Tensor | None]
"""A module, the name of a buffer of its own, and the buffer itself."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Where random numbers and a model's buffers stood: running means, counters, and whatever else.

    Columns: a buffer's place, its version, and a copy of what was in it; None of one that steps leave alone.
    """

    random: dict[str, Any]
    places: list[Place]
    versions: list[int]
    contents: list[torch.Tensor | None]

    @property
    def lost(self) -> str:
        """Name the buffers that were written to, and of which there is no copy; empty if there are none."""
        columns = zip(self.places, self.versions, self.contents, strict=True)
        return ", ".join(
            name
            for (_, name, tensor), before, content in columns
            if content is None and version(tensor) != before
        )

    def restore(self) -> None:
        """Put all back, in place."""
        set_random_state(self.random)
        if self.lost:
            warnings.warn(
                f"{self.lost}: written to in the step that is undone, and in none before: it stays as it is.",
                stacklevel=2,
            )
        with torch.no_grad():
            for (module, name, tensor), content in zip(self.places, self.contents, strict=True):
                if tensor is not None and content is not None:
                    tensor.copy_(content)
                module._buffers[name] = tensor  # a forward may have put another there


class Moments:
    """Notes where things stand before each step of a model, and learns which buffers its steps write to.

    The first time all are copied, to the host; from then on those alone, where they are: masks, tables and
    frozen weights cost nothing.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._written: set[tuple[nn.Module, str]] | None = None
        self._copies = Copies()

    def note(self) -> Moment:
        """Note how things stand."""
        places = list(_buffers(self._model))
        contents: list[torch.Tensor | None] = [None] * len(places)
        if self._written is None:
            contents = [None if one is None else one.detach().to("cpu", copy=True) for _, _, one in places]
        elif places:
            chosen = {
                at: one
                for at, (module, name, one) in enumerate(places)
                if one is not None and self._is_written(module, name)
            }
            for at, copied in zip(chosen, self._copies.of(list(chosen.values())), strict=True):
                contents[at] = copied
        return Moment(random_state(), places, [version(one) for _, _, one in places], contents)

    def learn(self, moment: Moment) -> None:
        """See what a step that was noted has written to."""
        first = self._written is None
        written = self._written = self._written or set()
        for (module, name, one), before, content in zip(
            moment.places, moment.versions, moment.contents, strict=True
        ):
            # Kernels may write without counting a version: looked for once, for it waits for the device.
            if version(one) != before or (first and not _is_same(one, content)):
                written.add((module, name))

    def _is_written(self, module: nn.Module, name: str) -> bool:
        # Batch normalization's kernels write without counting, and begin to when evaluation ends.
        normalizes = isinstance(module, _NormBase) and module.training
        return normalizes or (module, name) in (self._written or ())


class Copies:
    """Copies of tensors that are copied again and again: by few operations, into the same memory."""

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._shapes: list[Any] = []
        self._kinds: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    @torch.no_grad()
    def of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors; those of the last time are overwritten."""
        shapes = [one.shape for one in tensors]
        same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        if same and shapes == self._shapes:
            for to, of in self._kinds:
                torch._foreach_copy_(to, of)
            return self._copies
        self._tensors, self._copies = [], []  # until all are there
        copies = [one.clone() for one in tensors]
        kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for one, copied in zip(tensors, copies, strict=True):
            to, of = kinds.setdefault((one.dtype, one.device), ([], []))
            to.append(copied)
            of.append(one)
        self._kinds, self._shapes = list(kinds.values()), shapes
        self._copies, self._tensors = copies, tensors
        return copies


def _is_same(tensor: torch.Tensor | None, content: torch.Tensor | None) -> bool:
    if tensor is None or content is None:
        return True
    return tensor.layout is torch.strided and torch.equal(tensor.detach().cpu(), content)


def _buffers(model: nn.Module) -> Iterator[Place]:
    # As model.modules() does, which takes a microsecond a module more: this is done before each step.
    modules, seen = [model], {model}
    for module in modules:
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                modules.append(child)
        for name, buffer in module._buffers.items():
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
