"""Which memory lives when: from what a script asked of the allocator to buffers.

    requests        0  1  2  3  4  5  6          time is the position in them
    malloc a        ├────────┤                   a  [0, 3)
    malloc b           ├───────────┤             b  [1, 5)
    malloc c              ├──────────────        c  [2, 7): never freed, it lives until the end
    free a                   ·
    free b, later               ·  ·             another stream uses it until then

Training repeats its step, and so does a plan for it: see ``one_step``.
"""

from collections import defaultdict, deque
from collections.abc import Iterator

import numpy as np

from memfit.allocator.requests import RequestKind, Requests
from memfit.packing.buffers import Buffers, Column

ALIGNMENT = 512
"""Bytes: PyTorch's blocks begin at multiples of it, and kernels count on that."""
CPU_ALIGNMENT = 64
"""Bytes: ``gAlignment``, which PyTorch asks for on the CPU. Source: c10/core/alignment.h, PyTorch 2.14.1."""


def lifetimes(asked: Requests, alignment: int = ALIGNMENT) -> dict[tuple[int, int], Buffers]:
    """Return the buffers of each stream and pool: memory that no other stream or pool may use in between.

    A stream runs ahead of the others, and a CUDA graph's pool is used whenever the graph is replayed, of
    which the allocator hears nothing.

    Returns:
        By stream and pool (an index into ``asked.pools``), in the order in which they come. Sizes are
        rounded up to the alignment; a buffer's name is the event that tells of its malloc.
    """
    ask, block, size, stream, pool, event = (
        np.array(column, np.int64)
        for column in (asked.ask, asked.block, asked.size, asked.stream, asked.pool, asked.event)
    )
    lower = np.flatnonzero(ask == RequestKind.MALLOC)  # block n is the n-th of them
    upper = np.full(len(lower), len(ask))
    freed = np.flatnonzero(np.isin(ask, (RequestKind.FREE, RequestKind.GONE_ON)))
    upper[block[freed]] = freed
    rounded = -(-size[lower] // alignment) * alignment
    all_of_them = Buffers(lower, upper, rounded, tuple(event[lower].astype(str).tolist()))
    groups = np.stack([stream[lower], pool[lower]], axis=1)
    return {
        group: all_of_them.where((groups == group).all(axis=1))
        for group in dict.fromkeys(map(tuple, groups.tolist()))
    }


def last_step(asked: Requests) -> tuple[int, int, int] | None:
    """Return the last full training step, from 1, and when it began and ended; None if there was none."""
    ends = np.flatnonzero(np.array(asked.ask) == RequestKind.STEP)
    return (len(ends), int(ends[-2]), int(ends[-1])) if len(ends) > 1 else None


def one_step(buffers: Buffers, begin: int, end: int) -> Buffers:
    """Return the buffers of a training step that comes again and again, as one plan for all of them needs.

        step 2   │ step 3     │ step 4
        ─────────┼────────────┼─────────     weights live through every step
              ├──┼─┤      ├───┼──┤           a gradient of step 2, and its twin of step 3, are one place
                 │  ├───┤     │              an activation
         ├───────┼─────────┤  │              a loss that is kept until the next one is there: two live at
                 │     ├──────┼─────────┤    once, and its places are two

    Args:
        buffers: of the whole run.
        begin: when the step begins.
        end: when it ends.

    Returns:
        On a circle as long as the step.
    """
    period = end - begin
    lives = buffers.where((buffers.lower < end) & (buffers.upper > begin))
    old, new = lives.lower < begin, lives.upper > end
    lower = np.where(old, 0, lives.lower - begin)
    upper = np.where(new, period, lives.upper - begin)
    once = np.ones(len(lives), bool)
    for before, after in _twins(lives, np.flatnonzero(old & ~new), np.flatnonzero(new & ~old)):
        if upper[before] <= lower[after]:
            upper[after] += upper[before]
            once[before] = False
        else:
            lower[[before, after]], upper[[before, after]] = 0, period
    return Buffers(lower, upper, lives.size, lives.names, period).where(once)


def _twins(lives: Buffers, old: Column, new: Column) -> Iterator[tuple[int, int]]:
    """Pair what the step before left behind with what this step leaves behind: of a size, in order."""
    waiting: dict[int, deque[int]] = defaultdict(deque)
    for index in new[np.argsort(lives.lower[new])].tolist():
        waiting[int(lives.size[index])].append(index)
    for index in old[np.argsort(lives.lower[old])].tolist():
        if waiting[int(lives.size[index])]:
            yield index, waiting[int(lives.size[index])].popleft()
