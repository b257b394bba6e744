"""What a forward finds besides its arguments, and how it finds it again.

    forward       finds buffers b0, random numbers r0;  leaves b1, r1
    ... the rest of the step ...
    recomputation must find b0, r0;                     the model keeps b1, the generators their r9

``torch.utils.checkpoint`` sees to the CPU's generator and to those of its arguments' devices; not to
buffers, so that BatchNorm counts twice (PyTorch issue 96136), not to devices that no argument is on
(issue 14518), and not to Python's and NumPy's generators, with which blocks are skipped at random.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

from memfit.strategies.mechanisms.global_generators import NUMPY, PYTHON, same_state

Slot = tuple[int, str]
"""Where a buffer is: the module's place among ``region.modules()``, and the buffer's name in it."""


@dataclass(slots=True)
class BufferHabits:
    """Which buffers of a region its forwards change, as seen so far.

    The first forward of a kind notes every buffer and keeps those that it changed; later ones note only
    these. What kind it is depends on which modules are in training mode.
    """

    name: str
    """Of the region, for the warning."""
    _changed: dict[tuple[bool, ...], set[Slot]] = field(default_factory=dict)

    def note(self, region: nn.Module) -> "Buffers":
        """Note what a forward that is about to begin may change."""
        parts = list(region.modules())
        found = {
            (place, name): buffer
            for place, part in enumerate(parts)
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
        noted = {slot: copies[id(buffer)] for slot, buffer in found.items() if id(buffer) in copies}
        absent = [
            (place, name)
            for place, part in enumerate(parts)
            for name, buffer in part._buffers.items()
            if buffer is None
        ]
        versions = {slot: version(buffer) for slot, buffer in found.items()}
        return Buffers(parts, kind, known is None, found, versions, noted, absent)

    def learn(self, buffers: "Buffers") -> None:
        """Keep of what was noted that which the forward changed."""
        known = self._changed.setdefault(buffers.kind, set())
        if buffers.first:
            known |= {slot for slot in buffers.noted if buffers.replaced(slot) or buffers.overwritten(slot)}
            buffers.noted = {slot: copy for slot, copy in buffers.noted.items() if slot in known}
            return
        late = {slot for slot in buffers.found if slot not in buffers.noted and buffers.replaced(slot)}
        known |= late
        lost = {slot for slot in late if version(buffers.found[slot]) != buffers.versions[slot]}
        # What was replaced and not written to is still there.
        buffers.noted |= {slot: buffers.found[slot] for slot in late - lost}
        if lost:
            warnings.warn(
                f"{self.name}: a forward wrote to {', '.join(sorted(name for _, name in lost))}, as those "
                "before had not: this step's recomputation finds what was written, not what was there. Later "
                "steps are right.",
                stacklevel=2,
            )


@dataclass(slots=True)
class Buffers:
    """A region's buffers as one forward found them."""

    parts: list[nn.Module]
    kind: tuple[bool, ...]
    """Which were in training mode."""
    first: bool
    """Whether all were noted, to see which change."""
    found: dict[Slot, torch.Tensor]
    versions: dict[Slot, int]
    noted: dict[Slot, torch.Tensor]
    """Copies, of before the forward."""
    absent: list[Slot]
    """Those that were None: a forward may make them."""

    def replaced(self, slot: Slot) -> bool:
        """Say whether a buffer is another tensor now, or was written to."""
        place, name = slot
        now = self.parts[place]._buffers.get(name)
        return now is not self.found[slot] or version(now) != self.versions[slot]

    def overwritten(self, slot: Slot) -> bool:
        """Say whether a buffer's values are others: kernels may write without counting a version.

        Batch normalization's do; of its layers it is known, without waiting for the GPU to compare.
        """
        part = self.parts[slot[0]]
        if isinstance(part, _NormBase) and part.training:
            return True
        now = self.found[slot]
        return not now.is_meta and not torch.equal(now, self.noted[slot])

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let the modules find what was noted, in the mode they were in; what they do to it is forgotten.

        Other tensors are put in the buffers' places, and the buffers themselves are left alone: what
        autograd saved of them elsewhere stays valid, and an exception that ends the recomputation early
        does no harm.
        """
        now = {slot: self.parts[slot[0]]._buffers.get(slot[1]) for slot in (*self.noted, *self.absent)}
        modes = [part.training for part in self.parts]
        # Copies of the copies: there may be a second backward.
        with unseen():
            copies = {id(noted): _copy(noted) for noted in self.noted.values()}
        try:
            self._set_modes(self.kind)
            for (place, name), noted in self.noted.items():
                self.parts[place]._buffers[name] = copies[id(noted)]
            for place, name in self.absent:
                self.parts[place]._buffers[name] = None
            yield
        finally:
            self._set_modes(modes)
            for (place, name), buffer in now.items():
                self.parts[place]._buffers[name] = buffer

    def _set_modes(self, training: Sequence[bool]) -> None:
        for part, each in zip(self.parts, training, strict=True):
            if part.training is not each:
                part.training = each


@dataclass(slots=True)
class Draws:
    """Random numbers that a forward drew on GPUs, whichever they are, and from Python and NumPy.

    A CUDA generator is a seed and an offset, both on the host: reading them costs no synchronisation.
    """

    before: list[tuple[Any, Any]]
    """Generators and their states before the forward; after it, those that were drawn from."""

    @classmethod
    def note(cls) -> "Draws":
        """Note where the generators stand."""
        generators: list[Any] = [PYTHON, NUMPY]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            generators += torch.cuda.default_generators
        return cls([(one, one.get_state()) for one in generators])

    def settle(self) -> None:
        """Forget the generators that were not drawn from."""
        self.before = [(one, state) for one, state in self.before if not same_state(state, one.get_state())]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Let them give the same numbers once more, and go on afterwards as if they had not."""
        now = [(one, one.get_state()) for one, _ in self.before]
        try:
            for one, state in self.before:
                one.set_state(state)
            yield
        finally:
            for one, state in now:
                one.set_state(state)


def unseen() -> AbstractContextManager[Any]:
    """Return a context whose operations are no part of what is computed: who watches operations misses them.

    Regions around this one compare operations, or count them to keep some results; these here are not the
    same in a forward and in its recomputation.
    """
    return _disable_current_modes()


def tensors_in(thing: object, depth: int = 4) -> list[torch.Tensor]:
    """Return the tensors that an object holds, so many levels deep; a module's are its own business."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if depth == 0 or isinstance(thing, nn.Module | type):
        return []
    if isinstance(thing, Mapping):
        held: Iterable[object] = thing.values()
    elif isinstance(thing, list | tuple):
        held = thing
    else:
        held = getattr(thing, "__dict__", {}).values()
    return [tensor for each in held for tensor in tensors_in(each, depth - 1)]


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    # One that hangs on a graph is replaced by forwards, not written to; its gradient has to find the way.
    return buffer if buffer.requires_grad else buffer.detach().clone()


def version(value: object) -> int:
    """Return how often a tensor was written to, as autograd counts; 0 for what has no count."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0
