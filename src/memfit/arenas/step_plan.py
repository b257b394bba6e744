"""Turn a step that was recorded twice into offsets for the steps that repeat it.

Time counts allocations: allocation 4 is made at time 4; a tensor freed before allocation 7 is live until 7.
The step repeats, so time is a circle, and a gradient may live across its end: see ``packing/buffers.py``.
"""

from dataclasses import dataclass

import numpy as np

from memfit.arenas.native import LIVES
from memfit.packing.best_packing import pack
from memfit.packing.buffers import Buffers, Column

SECONDS = 2.0
"""Time limit of the packing. Plans of real steps are found in milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Offsets for the allocations of a step, in their order."""

    size: Column
    """Bytes requested."""
    offset: Column
    """Offset in the arena; -1 for an allocation left to the default allocator, because it outlives a step or
    other streams use it."""
    height: int
    """Arena size that the plan needs, in bytes."""
    bound: int
    """Lower bound on the height of any plan for this step, in bytes."""
    unshared: int
    """Sum of the placed allocations, in bytes: what they take if no memory is reused."""


NO_PLAN = StepPlan(np.zeros(0, np.int64), np.zeros(0, np.int64), 0, 0, 0)


def lifetimes(older: Column, newer: Column, *, follows: bool, alignment: int) -> tuple[Buffers, Column]:
    """Return the buffers that can be placed, and the indices of their allocations.

    Args:
        older: a recorded step: rows of size, until and next.
        newer: the next recording of the same step, with the same sizes.
        follows: whether the newer step came right after the older one. Otherwise it is unknown how long steps
            of other kinds kept the tensors that the older one left.
        alignment: sizes are rounded up to a multiple of this many bytes.

    >>> step = np.array(
    ...     [[100, 2, -1], [64, -1, 0], [8, -1, -1]]
    ... )  # the second outlives the step, the third is never freed
    >>> buffers, which = lifetimes(step, step, follows=True, alignment=64)
    >>> buffers.lower.tolist(), buffers.upper.tolist(), buffers.size.tolist(), which.tolist()
    ([0, 1], [2, 3], [128, 64], [0, 1])
    """
    size, until, following = older.T
    newer_until = newer[:, 1]
    born = np.arange(len(size))
    within = (until > born) & (newer_until > born)
    across_the_end = (
        (until == LIVES) & (newer_until == LIVES) & (following >= 0) & (following <= born) & follows
    )
    upper = np.where(within, np.maximum(until, newer_until), len(size) + following)
    which = np.flatnonzero(within | across_the_end)
    rounded = -(-size[which] // alignment) * alignment
    names = tuple(map(str, which.tolist()))
    return Buffers(which, upper[which], rounded, names, len(size)), which


def plan_step(older: Column, newer: Column, *, follows: bool, alignment: int) -> StepPlan:
    """Plan a step from two recordings of it: see ``lifetimes``."""
    buffers, which = lifetimes(older, newer, follows=follows, alignment=alignment)
    offset = np.full(len(older), -1, np.int64)
    size = np.ascontiguousarray(older[:, 0])
    if not len(buffers):
        return StepPlan(size, offset, 0, 0, 0)
    packing = pack(buffers, seconds=SECONDS)
    offset[which] = packing.offset
    return StepPlan(size, offset, packing.height, packing.bound, int(buffers.size.sum()))
