"""From what a step asked for, recorded twice, to offsets for the steps that repeat it.

Time is counted in allocations: number 4 is made at 4, and what is freed before number 7 lives until 7. A step
comes again and again, so time is a circle, and a gradient may live over its end: see ``packing/buffers.py``.
"""

from dataclasses import dataclass

import numpy as np

from memfit.arenas.native import LIVES
from memfit.packing.best_packing import pack
from memfit.packing.buffers import Buffers, Column

SECONDS = 2.0
"""That are spent on a plan at most; those of real steps are found in milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Offsets for the allocations of a step, in their order."""

    size: Column
    """Bytes, as asked for."""
    offset: Column
    """-1 for what is the ordinary allocator's: it is kept longer than a step, or other streams use it."""
    height: int
    """Bytes of the arena that it needs."""
    bound: int
    """Bytes that no plan for the same is below."""
    unshared: int
    """Bytes if each allocation that is placed had memory of its own."""


NO_PLAN = Plan(np.zeros(0, np.int64), np.zeros(0, np.int64), 0, 0, 0)


def lives(older: Column, newer: Column, *, follows: bool, alignment: int) -> tuple[Buffers, Column]:
    """Return the buffers that can be placed, and which allocations of the step they are.

    Args:
        older: a step as it was recorded: rows of size, until and next.
        newer: the same step again, with the same sizes.
        follows: whether it came right after the older one. Otherwise nobody knows for how long a step of
            another kind kept what the older one left.
        alignment: bytes that sizes are rounded up to.

    >>> step = np.array([[100, 2, -1], [64, -1, 0], [8, -1, -1]])  # the second lives on, the third for good
    >>> buffers, which = lives(step, step, follows=True, alignment=64)
    >>> buffers.lower.tolist(), buffers.upper.tolist(), buffers.size.tolist(), which.tolist()
    ([0, 1], [2, 3], [128, 64], [0, 1])
    """
    size, until, following = older.T
    again = newer[:, 1]
    born = np.arange(len(size))
    within = (until > born) & (again > born)
    over_the_end = (until == LIVES) & (again == LIVES) & (following >= 0) & (following <= born) & follows
    upper = np.where(within, np.maximum(until, again), len(size) + following)
    which = np.flatnonzero(within | over_the_end)
    rounded = -(-size[which] // alignment) * alignment
    names = tuple(map(str, which.tolist()))
    return Buffers(which, upper[which], rounded, names, len(size)), which


def planned(older: Column, newer: Column, *, follows: bool, alignment: int) -> Plan:
    """Plan for a step that came twice: see ``lives``."""
    buffers, which = lives(older, newer, follows=follows, alignment=alignment)
    offset = np.full(len(older), -1, np.int64)
    size = np.ascontiguousarray(older[:, 0])
    if not len(buffers):
        return Plan(size, offset, 0, 0, 0)
    packing = pack(buffers, seconds=SECONDS)
    offset[which] = packing.offset
    return Plan(size, offset, packing.height, packing.bound, int(buffers.size.sum()))
