"""Which memory lives when: from what a script asked of the allocator to buffers.

requests        0  1  2  3  4  5  6          time is the position in them
malloc a        ├────────┤                   a  [0, 3)
malloc b           ├───────────┤             b  [1, 5)
malloc c              ├──────────────        c  [2, 7): never freed, it lives until the end
free a                   ·
free b, later               ·  ·             another stream uses it until then
"""

import numpy as np

from memfit.allocator.requests import Ask, Requests
from memfit.packing.buffers import Buffers

ALIGNMENT = 512
"""Bytes: PyTorch's blocks begin at multiples of it, and kernels count on that."""


def lifetimes(asked: Requests) -> dict[tuple[int, int], Buffers]:
    """Return the buffers of each stream and pool: memory that no other stream or pool may use in between.

    A stream runs ahead of the others, and a CUDA graph's pool is used whenever the graph is replayed, of
    which the allocator hears nothing.

    Returns:
        By stream and pool (an index into ``asked.pools``), in the order in which they come. Sizes are
        rounded up to ``ALIGNMENT``; a buffer's name is the event that tells of its malloc.
    """
    ask, block, size, stream, pool, event = (
        np.array(column, np.int64)
        for column in (asked.ask, asked.block, asked.size, asked.stream, asked.pool, asked.event)
    )
    lower = np.flatnonzero(ask == Ask.MALLOC)  # block n is the n-th of them
    upper = np.full(len(lower), len(ask))
    freed = np.flatnonzero(np.isin(ask, (Ask.FREE, Ask.GONE_ON)))
    upper[block[freed]] = freed
    rounded = -(-size[lower] // ALIGNMENT) * ALIGNMENT
    names = event[lower].astype(str)
    groups = np.stack([stream[lower], pool[lower]], axis=1)
    found = {}
    for group in dict.fromkeys(map(tuple, groups.tolist())):
        of_it = (groups == group).all(axis=1)
        found[group] = Buffers(lower[of_it], upper[of_it], rounded[of_it], tuple(names[of_it].tolist()))
    return found
