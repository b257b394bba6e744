"""A module's buffers and plain attributes before a forward, put back while the forward is recomputed.

    forward       reads buffers b0, random numbers r0;    leaves b1, r1
    ... the rest of the step ...
    recomputation must read b0, r0;                       the model keeps b1, the generators keep r9

``torch.utils.checkpoint`` restores the CPU's generator and those of its arguments' devices. It does not
restore buffers, so that BatchNorm counts twice (PyTorch issue 96136), nor devices without an argument
(issue 14518), nor Python's and NumPy's generators, with which blocks are skipped at random, nor attributes
that a loop sets between two forwards (``model.task = "b"``). Buffers and attributes are restored here, the
other generators, a module's own among them, by ``memfit.random_state``.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from memfit.dispatch_modes import without_dispatch_modes
from memfit.random_state import generators_in
from memfit.strategies.mechanisms.inspect_tensors import tensor_version
from memfit.user_lines import warn_user

Slot = tuple[int, str]
"""A buffer's location: the index of its module in ``region.modules()``, and its name in that module."""
_TABLES = frozenset(vars(nn.Module()))
"""Attributes of every module: tables of hooks and parameters, and the mode."""
_PLAIN = frozenset({bool, int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, FunctionType})


@dataclass(slots=True)
class BufferTracker:
    """The buffers that a region's forwards change, as far as seen.

    The first forward of a kind copies every buffer and keeps the copies of those that it changed; later
    forwards copy only these. The kind is which modules are in training mode.
    """

    name: str
    """Of the region, for the warning."""
    _changed: dict[tuple[bool, ...], set[Slot]] = field(default_factory=dict)

    def snapshot(self, region: nn.Module) -> "_BufferSnapshot":
        """Copy the buffers that the coming forward may change."""
        parts = list(region.modules())
        found = {
            (index, name): buffer
            for index, part in enumerate(parts)
            for name, buffer in part._buffers.items()
            if buffer is not None
        }
        kind = tuple(part.training for part in parts)
        known = self._changed.get(kind)
        # Buffers that modules share stay shared when they are swapped.
        copies = {
            id(found[slot]): _copy(found[slot])
            for slot in (found if known is None else known)
            if slot in found
        }
        copied = {slot: copies[id(buffer)] for slot, buffer in found.items() if id(buffer) in copies}
        absent = [
            (index, name)
            for index, part in enumerate(parts)
            for name, buffer in part._buffers.items()
            if buffer is None
        ]
        versions = {slot: tensor_version(buffer) for slot, buffer in found.items()}
        return _BufferSnapshot(
            parts,
            kind,
            known is None,
            found,
            versions,
            copied,
            absent,
            *_attributes(parts),
            _layers_and_parameters(parts),
        )

    def record_changes(self, snapshot: "_BufferSnapshot") -> None:
        """Record which buffers the forward changed; drop the copies of the others."""
        if _layers_and_parameters(snapshot.parts) != snapshot.layers_and_parameters:
            # It has made layers: with the attributes from before it would make others.
            snapshot.attributes, _ = _attributes(snapshot.parts)
            snapshot.layers_and_parameters = _layers_and_parameters(snapshot.parts)
        known = self._changed.setdefault(snapshot.kind, set())
        if snapshot.first:
            known |= {
                slot for slot in snapshot.copies if snapshot.replaced(slot) or snapshot.overwritten(slot)
            }
            snapshot.copies = {slot: copy for slot, copy in snapshot.copies.items() if slot in known}
            return
        late = {slot for slot in snapshot.found if slot not in snapshot.copies and snapshot.replaced(slot)}
        known |= late
        lost = {slot for slot in late if tensor_version(snapshot.found[slot]) != snapshot.versions[slot]}
        # A buffer that was replaced and not written to still has its values.
        snapshot.copies |= {slot: snapshot.found[slot] for slot in late - lost}
        if lost:
            warn_user(
                f"{self.name}: this forward was the first to change "
                f"{', '.join(sorted(name for _, name in lost))}. memfit copies only buffers that an earlier "
                "forward has changed. The recomputation of this step therefore reads the new values, not "
                "those from before the forward. Later steps are correct.",
            )


@dataclass(slots=True)
class _BufferSnapshot:
    """A region's buffers and plain attributes before one forward."""

    parts: list[nn.Module]
    kind: tuple[bool, ...]
    """Which parts were in training mode."""
    first: bool
    """Whether all buffers were copied, to find out which change."""
    found: dict[Slot, torch.Tensor]
    versions: dict[Slot, int]
    copies: dict[Slot, torch.Tensor]
    """Copies made before the forward."""
    absent: list[Slot]
    """Buffers that were None: a forward may create them."""
    attributes: list[tuple[tuple[str, ...], dict[str, Any]]]
    """The names of each part's, and the plain ones."""
    generators: list[Any]
    layers_and_parameters: list[tuple[int, dict[str, bool]]]
    """How many layers each part has, and which of its parameters were trained."""

    def replaced(self, slot: Slot) -> bool:
        """Return whether a buffer is another tensor now, or was written to."""
        index, name = slot
        now = self.parts[index]._buffers.get(name)
        return now is not self.found[slot] or tensor_version(now) != self.versions[slot]

    def overwritten(self, slot: Slot) -> bool:
        """Return whether a buffer's values changed: kernels may write without counting a version.

        Batch normalization's kernels do; its layers are known to write, without waiting for the GPU to
        compare.
        """
        part = self.parts[slot[0]]
        if isinstance(part, _NormBase) and part.training:
            return True
        now = self.found[slot]
        return not now.is_meta and not torch.equal(now, self.copies[slot])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Give the modules the copied buffers, their former modes and plain attributes; freeze as before.

        Other tensors take the buffers' places, and the buffers themselves are left alone: whatever autograd
        saved of them elsewhere stays valid, and an exception that ends the recomputation early does no harm.
        Changes to buffers and attributes are discarded afterwards.
        """
        now = {slot: self.parts[slot[0]]._buffers.get(slot[1]) for slot in (*self.copies, *self.absent)}
        # Copies of the copies: there may be a second backward.
        with without_dispatch_modes():
            replacements = {id(copied): _copy(copied) for copied in self.copies.values()}
        try:
            with self._attributes_restored():
                for (index, name), copied in self.copies.items():
                    self.parts[index]._buffers[name] = replacements[id(copied)]
                for index, name in self.absent:
                    self.parts[index]._buffers[name] = None
                yield
        finally:
            for (index, name), buffer in now.items():
                self.parts[index]._buffers[name] = buffer

    @contextmanager
    def _attributes_restored(self) -> Iterator[None]:
        modes = [part.training for part in self.parts]
        now = [dict(vars(part)) for part in self.parts]
        toggled = [
            each
            for part, (_, trained) in zip(self.parts, self.layers_and_parameters, strict=True)
            for name, each in part._parameters.items()
            if each is not None and trained.get(name, each.requires_grad) != each.requires_grad
        ]
        try:
            self._set_modes(self.kind)
            _toggle(toggled)
            for part, (names, plain) in zip(self.parts, self.attributes, strict=True):
                own = vars(part)
                own.update(plain)
                for name in own.keys() - names if len(own) > len(names) else ():
                    if _is_plain(own[name]):
                        del own[name]
            yield
        finally:
            for part, before in zip(self.parts, now, strict=True):
                own = vars(part)
                own.update(before)
                for name in own.keys() - before.keys() if len(own) > len(before) else ():
                    del own[name]
            _toggle(toggled)
            self._set_modes(modes)

    def _set_modes(self, training: Sequence[bool]) -> None:
        for part, mode in zip(self.parts, training, strict=True):
            if part.training is not mode:
                part.training = mode


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    # Forwards replace a buffer that is part of a graph, and do not write to it; its gradient needs the graph.
    return buffer if buffer.requires_grad else buffer.detach().clone()


def own_generators(module: nn.Module) -> list[Any]:
    """Return the generators of random numbers among modules' attributes, and in containers among these.

    >>> own_generators(nn.Dropout())
    []
    """
    return _attributes(module.modules())[1]


def _attributes(
    parts: Iterable[nn.Module],
) -> tuple[list[tuple[tuple[str, ...], dict[str, Any]]], list[Any]]:
    """Return the names of modules' attributes with those whose values cannot change, and the generators.

    Tensors are among the first, but for those that hold a graph.
    """
    plain: list[tuple[tuple[str, ...], dict[str, Any]]] = []
    generators: dict[int, Any] = {}
    for part in parts:
        own = {}
        for name, value in vars(part).items():
            if name in _TABLES:
                continue
            if _is_plain(value):
                own[name] = value
            else:
                generators |= {id(each): each for each in generators_in(value)}
        plain.append((tuple(vars(part)), own))
    return plain, list(generators.values())


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    if isinstance(value, torch.Tensor):
        return value.grad_fn is None
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, Enum)


def _layers_and_parameters(parts: Sequence[nn.Module]) -> list[tuple[int, dict[str, bool]]]:
    return [
        (
            len(part._modules),
            {name: each.requires_grad for name, each in part._parameters.items() if each is not None},
        )
        for part in parts
    ]


def _toggle(parameters: Iterable[nn.Parameter]) -> None:
    for each in {id(each): each for each in parameters}.values():
        each.requires_grad_(not each.requires_grad)
