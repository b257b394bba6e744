"""A run's memory, each stream and pool of it packed into an arena of its own; or a graph's, each device's."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from memfit.allocator.requests import Requests
from memfit.errors import UsageError
from memfit.packing.best_packing import Packing, pack
from memfit.packing.buffers import Buffers, Column, joined, sections
from memfit.packing.lifetimes import ALIGNMENT, last_step, lifetimes, one_step
from memfit.records import Provenance, SettingOutcome


@dataclass(frozen=True, slots=True, eq=False)
class Arena:
    """Memory that one stream and pool has for itself."""

    stream: int
    """As ``Events.stream`` numbers them."""
    pool: tuple[int, int]
    """As PyTorch numbers them; (0, 0) is no private one."""
    packing: Packing


class _Arena(Protocol):
    @property
    def packing(self) -> Packing: ...


class Arenas:
    """Packings that have nothing in common: each has memory of its own."""

    __slots__ = ()
    arenas: tuple[_Arena, ...]

    @property
    def height(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.packing.height for arena in self.arenas)

    @property
    def bound(self) -> int:
        """Bytes that no arenas are below: each one's peak of what lives at once."""
        return sum(arena.packing.bound for arena in self.arenas)

    @property
    def unshared(self) -> int:
        """Bytes if each buffer had memory of its own."""
        return sum(arena.packing.unshared for arena in self.arenas)

    @property
    def parts(self) -> tuple[tuple[Buffers, Column], ...]:
        """Buffers and their offsets, with the arenas one above the other."""
        bases = itertools.accumulate((arena.packing.height for arena in self.arenas), initial=0)
        return tuple(
            (arena.packing.buffers, arena.packing.offset + base)
            for arena, base in zip(self.arenas, bases, strict=False)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Packed(Arenas):
    """The memory of a training step, packed, beside what it takes without; of a whole run without steps."""

    step: int
    """The last full training step, from 1: its plan is good for all that repeat it. 0: the whole run."""
    arenas: tuple[Arena, ...]
    live: int
    """Bytes that live at once, at most, each buffer's rounded up to the alignment."""
    reserved: tuple[SettingOutcome, ...]
    """What PyTorch's allocator reserves in the whole run: as recorded, then under other settings."""
    sure: Provenance
    """How sure the sizes are that were asked for."""


def pack_run(
    asked: Requests,
    reserved: tuple[SettingOutcome, ...],
    sure: Provenance,
    *,
    alignment: int = ALIGNMENT,
    capacity: int | None = None,
    seconds: float,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Packed:
    """Pack what a script asked of the allocator.

    Args:
        asked: ``requests(trace)``.
        reserved: how the same run fares without.
        sure: how sure the sizes are.
        alignment: bytes that places are multiples of.
        capacity: bytes that are enough for all arenas; None: as few as there can be.
        seconds: that are spent at most, about.
        on_progress: called with what is being tried.

    Raises:
        UsageError: nothing was asked.
    """
    lives = lifetimes(asked, alignment)
    step, begin, end = last_step(asked) or (0, 0, len(asked.ask))
    # What a CUDA graph's pool holds is used again, whenever it was freed; all else comes anew in each step.
    groups = {
        (stream, pool): one_step(buffers, begin, end) if step and not pool else buffers
        for (stream, pool), buffers in lives.items()
    }
    groups = {group: buffers for group, buffers in groups.items() if len(buffers)}
    if not groups:
        raise UsageError("There is nothing to pack: the run asked for no memory.")
    packings = pack_each(list(groups.values()), capacity, seconds=seconds, on_progress=on_progress)
    arenas = tuple(
        Arena(stream, asked.pools[pool], packing)
        for (stream, pool), packing in zip(groups, packings, strict=True)
    )
    return Packed(step, arenas, _live(joined(list(lives.values())), begin, end), reserved, sure)


def pack_each(
    groups: Sequence[Buffers], capacity: int | None, *, seconds: float, on_progress: Callable[[str], None]
) -> tuple[Packing, ...]:
    """Pack what has nothing in common, each by itself, within what is enough for all and in the time for all.

    Args:
        groups: at least one, none of them empty.
        capacity: as of ``pack_run``.
        seconds: as of ``pack_run``.
        on_progress: as of ``pack_run``.
    """
    count = sum(map(len, groups))
    slack = None if capacity is None else capacity - sum(sections(group).bound for group in groups)
    packings = []
    for buffers in groups:
        share = len(buffers) / count
        enough = None if slack is None else sections(buffers).bound + max(int(slack * share), 0)
        packings.append(pack(buffers, enough, seconds=seconds * share, on_progress=on_progress))
    return tuple(packings)


def _live(buffers: Buffers, begin: int, end: int) -> int:
    """Return the bytes that live at once, at most, between two moments."""
    within = buffers.where((buffers.lower < end) & (buffers.upper > begin))
    lower, upper = np.maximum(within.lower, begin), np.minimum(within.upper, end)
    return sections(Buffers(lower, upper, within.size, within.names)).bound
