"""Lifetimes of a script's allocations: from requests to the allocator to buffers.

    requests        0  1  2  3  4  5  6          time is the position of a request
    malloc a        ├────────┤                   a  [0, 3)
    malloc b           ├───────────┤             b  [1, 5)
    malloc c              ├──────────────        c  [2, 7): never freed, so live until the end
    free a                   ·
    free b, later               ·  ·             at 4, but another stream uses it until 5

Training repeats its step, and so does a plan of the step: see ``buffers_of_repeating_step``.
"""

from collections import defaultdict, deque
from collections.abc import Iterator

import numpy as np

from memfit.allocator.requests import AllocatorRequests, RequestKind
from memfit.packing.buffer_lifetimes import Buffers, Column

ALIGNMENT = 512
"""Bytes: PyTorch's blocks begin at multiples of it, and kernels rely on that."""
CPU_ALIGNMENT = 64
"""Bytes: ``gAlignment``, the alignment of PyTorch's CPU allocations. Source: c10/core/alignment.h, PyTorch
2.14.1."""


def buffers_of_requests(requests: AllocatorRequests) -> dict[tuple[int, int], Buffers]:
    """Return the buffers of each stream and pool, which must not share memory with each other.

    Streams run asynchronously, and a CUDA graph uses its pool at every replay, which the allocator does not
    see.

    Returns:
        Buffers by stream and pool (an index into ``requests.pools``), in the order of their first requests.
        Sizes are rounded up to the alignment; a buffer's name is the position of its malloc in the history.
    """
    ask, block, size, stream, pool, event = (
        np.array(column, np.int64)
        for column in (
            requests.ask,
            requests.block,
            requests.size,
            requests.stream,
            requests.pool,
            requests.event,
        )
    )
    lower = np.flatnonzero(ask == RequestKind.MALLOC)  # the n-th malloc allocates block n
    upper = np.full(len(lower), len(ask))
    freed = np.flatnonzero(np.isin(ask, (RequestKind.FREE, RequestKind.GONE_ON)))
    upper[block[freed]] = freed
    rounded = -(-size[lower] // ALIGNMENT) * ALIGNMENT
    all_of_them = Buffers(lower, upper, rounded, tuple(event[lower].astype(str).tolist()))
    groups = np.stack([stream[lower], pool[lower]], axis=1)
    return {
        group: all_of_them.where((groups == group).all(axis=1))
        for group in dict.fromkeys(map(tuple, groups.tolist()))
    }


def last_full_step(requests: AllocatorRequests) -> tuple[int, int, int] | None:
    """Return the number of the last full training step, from 1, with its begin and end; None without one."""
    ends = np.flatnonzero(np.array(requests.ask) == RequestKind.STEP)
    return (len(ends), int(ends[-2]), int(ends[-1])) if len(ends) > 1 else None


def buffers_of_repeating_step(buffers: Buffers, begin: int, end: int) -> Buffers:
    """Return the buffers of a repeating training step, as one plan for all repetitions needs them.

        step 2   │ step 3     │ step 4
        ─────────┼────────────┼─────────     weights are live in every step
              ├──┼─┤      ├───┼──┤           a gradient of step 2 and its successor of step 3: one buffer
                 │  ├───┤     │              an activation
         ├───────┼─────────┤  │              a loss that is kept until the next one exists: two are live at
                 │     ├──────┼─────────┤    once, so they are two buffers

    Returns:
        Buffers in circular time, with the length of the step as their period.
    """
    period = end - begin
    lives = buffers.where((buffers.lower < end) & (buffers.upper > begin))
    old, new = lives.lower < begin, lives.upper > end
    lower = np.where(old, 0, lives.lower - begin)
    upper = np.where(new, period, lives.upper - begin)
    kept = np.ones(len(lives), bool)
    for predecessor, successor in _pair_successors(
        lives, np.flatnonzero(old & ~new), np.flatnonzero(new & ~old)
    ):
        if upper[predecessor] <= lower[successor]:
            upper[successor] += upper[predecessor]
            kept[predecessor] = False
        else:
            lower[[predecessor, successor]], upper[[predecessor, successor]] = 0, period
    return Buffers(lower, upper, lives.size, lives.names, period).where(kept)


def _pair_successors(lives: Buffers, old: Column, new: Column) -> Iterator[tuple[int, int]]:
    """Pair buffers left by the previous step with those this step leaves: of equal size, in order."""
    waiting: dict[int, deque[int]] = defaultdict(deque)
    for index in new[np.argsort(lives.lower[new])].tolist():
        waiting[int(lives.size[index])].append(index)
    for index in old[np.argsort(lives.lower[old])].tolist():
        if waiting[int(lives.size[index])]:
            yield index, waiting[int(lives.size[index])].popleft()
