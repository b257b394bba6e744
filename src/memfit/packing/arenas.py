"""A run's memory, each stream and pool of it packed into an arena of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memfit.allocator.compare import Outcome
from memfit.allocator.requests import Ask, Requests
from memfit.packing.best import Packing, pack
from memfit.packing.buffers import Buffers, Column, sections
from memfit.packing.lifetimes import lifetimes


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """Memory that one stream and pool has for itself."""

    stream: int
    """As ``Events.stream`` numbers them."""
    pool: tuple[int, int]
    """As PyTorch numbers them; (0, 0) is no private one."""
    packing: Packing


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A run's memory, packed, beside what it takes without."""

    arenas: tuple[Arena, ...]
    unshared: int
    """Bytes if each allocation of the last full training step, and what lives through it, had memory of its
    own; of the whole run if there was no such step."""
    unshared_step: int
    """That training step; 0 if there was none."""
    live: int
    """Bytes that live at once, at most, rounded up to ``lifetimes.ALIGNMENT`` each."""
    buffers: Buffers
    """All of them."""
    reserved: tuple[Outcome, ...]
    """What PyTorch's allocator reserves: as recorded, then under other settings."""

    @property
    def offset(self) -> Column:
        """Each buffer's offset, with the arenas one above the other."""
        heights = [arena.packing.height for arena in self.arenas]
        bases = np.cumsum([0, *heights])[:-1]
        return np.concatenate(
            [arena.packing.offset + base for arena, base in zip(self.arenas, bases, strict=True)]
        )

    @property
    def height(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.packing.height for arena in self.arenas)

    @property
    def bound(self) -> int:
        """Bytes that no arenas are below: each stream's and pool's peak of what lives at once."""
        return sum(arena.packing.bound for arena in self.arenas)


def pack_run(
    asked: Requests,
    reserved: tuple[Outcome, ...],
    *,
    capacity: int | None = None,
    seconds: float,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Packed:
    """Pack what a script asked of the allocator.

    Args:
        asked: ``requests(trace)``.
        reserved: how the same run fares without.
        capacity: bytes that are enough for all arenas; None: as few as there can be.
        seconds: that are spent at most, about.
        on_progress: called with what is being tried.
    """
    groups = lifetimes(asked)
    others = sum(sections(buffers).bound for buffers in groups.values())
    arenas = []
    for (stream, pool), buffers in groups.items():
        own = sections(buffers).bound
        enough = None if capacity is None else own + max(capacity - others, 0) // len(groups)
        share = seconds * len(buffers) / sum(map(len, groups.values()))
        packing = pack(buffers, enough, seconds=share, on_progress=on_progress)
        arenas.append(Arena(stream, asked.pools[pool], packing))
    together = _together(tuple(groups.values()))
    unshared, step = _unshared(asked, together)
    return Packed(tuple(arenas), unshared, step, sections(together).bound, together, reserved)


def _together(groups: tuple[Buffers, ...]) -> Buffers:
    lower, upper, size = (
        np.concatenate([getattr(buffers, name) for buffers in groups]) for name in ("lower", "upper", "size")
    )
    return Buffers(lower, upper, size, tuple(name for buffers in groups for name in buffers.names))


def _unshared(asked: Requests, buffers: Buffers) -> tuple[int, int]:
    """Return the sizes of all buffers of the last full training step, and which step that is."""
    ends = np.flatnonzero(np.array(asked.ask) == Ask.STEP)
    if len(ends) <= 1:
        return int(buffers.size.sum()), 0
    begin, end = ends[-2], ends[-1]
    within = (buffers.lower < end) & (buffers.upper > begin)
    return int(buffers.size[within].sum()), len(ends)
