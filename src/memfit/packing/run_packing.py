"""Pack the memory of a run, each stream and pool by itself."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from memfit.allocator.requests import AllocatorRequests
from memfit.errors import UsageError
from memfit.packing.allocation_lifetimes import (
    buffers_of_repeating_step,
    buffers_of_requests,
    last_full_step,
)
from memfit.packing.best_packing import Packing, pack_buffers
from memfit.packing.buffer_lifetimes import Buffers, Column, concatenate_buffers, lifetime_sections
from memfit.records import Provenance, SettingOutcome
from memfit.records.printable_result import PrintableResult


@dataclass(frozen=True, slots=True, eq=False)
class PoolPacking:
    """The packing of the memory that one stream and pool has for itself."""

    stream: int
    """As numbered in ``Events.stream``."""
    pool: tuple[int, int]
    """As numbered by PyTorch; (0, 0) is the default pool."""
    packing: Packing


class _HasPacking(Protocol):
    @property
    def packing(self) -> Packing: ...


class IndependentPackings:
    """Packings that share no memory with each other."""

    __slots__ = ()
    arenas: tuple[_HasPacking, ...]

    @property
    def height(self) -> int:
        """Bytes that all packings need together."""
        return sum(arena.packing.height for arena in self.arenas)

    @property
    def bound(self) -> int:
        """Bytes below which no packings are possible: the sum of their bounds."""
        return sum(arena.packing.bound for arena in self.arenas)

    @property
    def unshared(self) -> int:
        """Bytes needed if no buffers shared memory."""
        return sum(arena.packing.unshared for arena in self.arenas)

    @property
    def parts(self) -> tuple[tuple[Buffers, Column], ...]:
        """The buffers of each packing and their offsets, with the packings stacked on top of each other."""
        bases = itertools.accumulate((arena.packing.height for arena in self.arenas), initial=0)
        return tuple(
            (arena.packing.buffers, arena.packing.offset + base)
            for arena, base in zip(self.arenas, bases, strict=False)
        )


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class RunPacking(PrintableResult, IndependentPackings):
    """The packed memory of a training step, or of a run without steps, and what the allocator reserves."""

    step: int
    """The last full training step, from 1: its plan is valid for every step like it. 0: the whole run."""
    arenas: tuple[PoolPacking, ...]
    live: int
    """The peak of bytes live at once, with each buffer rounded up to the alignment."""
    reserved: tuple[SettingOutcome, ...]
    """What PyTorch's allocator reserves in the whole run: as recorded, then with other settings."""
    sure: Provenance
    """Provenance of the requested sizes."""


def pack_run_memory(
    requests: AllocatorRequests,
    reserved: tuple[SettingOutcome, ...],
    sure: Provenance,
    *,
    capacity: int | None = None,
    seconds: float,
    on_progress: Callable[[str], None] = lambda _: None,
) -> RunPacking:
    """Pack the memory that a script requested from the allocator.

    Args:
        requests: ``requests(trace)``.
        reserved: what PyTorch's allocator reserves in the same run.
        sure: provenance of the requested sizes.
        capacity: bytes that are enough for all streams and pools together; None: as few as possible.
        seconds: approximate time limit.
        on_progress: called with a description of each attempt.
    """
    lives = buffers_of_requests(requests)
    step, begin, end = last_full_step(requests) or (0, 0, len(requests.ask))
    # Each replay of a CUDA graph reuses the memory of its pool, freed or not; all other memory is allocated
    # again in each step.
    groups = {
        (stream, pool): buffers_of_repeating_step(buffers, begin, end) if step and not pool else buffers
        for (stream, pool), buffers in lives.items()
    }
    groups = {group: buffers for group, buffers in groups.items() if len(buffers)}
    if not groups:
        raise UsageError("There is nothing to pack: the run requested no memory.")
    packings = pack_independent_groups(
        list(groups.values()), capacity, seconds=seconds, on_progress=on_progress
    )
    arenas = tuple(
        PoolPacking(stream, requests.pools[pool], packing)
        for (stream, pool), packing in zip(groups, packings, strict=True)
    )
    return RunPacking(
        step, arenas, _live(concatenate_buffers(list(lives.values())), begin, end), reserved, sure
    )


def pack_independent_groups(
    groups: Sequence[Buffers], capacity: int | None, *, seconds: float, on_progress: Callable[[str], None]
) -> tuple[Packing, ...]:
    """Pack groups of buffers that share no memory, dividing the capacity and the time among them."""
    count = sum(map(len, groups))
    slack = None if capacity is None else capacity - sum(lifetime_sections(group).bound for group in groups)
    packings = []
    for buffers in groups:
        share = len(buffers) / count
        enough = None if slack is None else lifetime_sections(buffers).bound + max(int(slack * share), 0)
        packings.append(pack_buffers(buffers, enough, seconds=seconds * share, on_progress=on_progress))
    return tuple(packings)


def _live(buffers: Buffers, begin: int, end: int) -> int:
    """Return the peak of bytes live at once between two moments."""
    within = buffers.where((buffers.lower < end) & (buffers.upper > begin))
    lower, upper = np.maximum(within.lower, begin), np.minimum(within.upper, end)
    return lifetime_sections(Buffers(lower, upper, within.size, within.names)).bound
