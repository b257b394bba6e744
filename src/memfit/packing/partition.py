"""Split a packing problem in time into parts that can be packed independently.

    │ part 0  │ part 1 │ part 2  │     no buffer is live in two parts
    ├─────────┴────────┴─────────┤
    │ always live                │     can be placed at the bottom, because it overlaps every other buffer
    └────────────────────────────┘

Consecutive forward passes share only the weights: each pass is a part, and all parts look alike. So are the
micro-batches of a step that accumulates gradients, once the gradients are treated as always live: see
``treat_as_always_live``.
"""

import numpy as np
import numpy.typing as npt

from memfit.packing.buffers import Column, Sections


def partition(cut: Sections, always: npt.NDArray[np.bool_]) -> Column:
    """Return the part, from 0, of each buffer that is not always live.

    Args:
        cut: the sections of the buffers.
        always: mask of the buffers at the bottom: from ``always_live`` or ``treat_as_always_live``.

    >>> from memfit.packing.buffers import Buffers, sections
    >>> rows = Buffers(np.array([0, 0, 3, 4]), np.array([9, 3, 5, 9]), np.array([4, 2, 1, 1]), tuple("abcd"))
    >>> cut = sections(rows)
    >>> partition(cut, always_live(cut)).tolist()
    [0, 1, 1]
    """
    first, last = cut.first[~always], cut.last[~always]
    # A buffer connects each of its sections, but the first, with the section before. In circular time it may
    # extend beyond the last section: it is then counted in the second half, which is folded onto the first.
    change = np.zeros(2 * cut.count + 1, np.int64)
    np.add.at(change, first + 1, 1)
    np.add.at(change, last, -1)
    connections = np.cumsum(change)[:-1].reshape(2, cut.count).sum(axis=0)
    begins = np.flatnonzero(connections == 0)
    # A buffer that begins before the first part does belongs to the last one, which wraps around.
    inside = (np.searchsorted(begins, first, "right") - 1) % max(len(begins), 1)
    return np.unique(inside, return_inverse=True)[1]


def always_live(cut: Sections) -> npt.NDArray[np.bool_]:
    """Return a mask of the buffers that are live in every section."""
    return cut.last - cut.first >= cut.count


def treat_as_always_live(cut: Sections, size: Column) -> npt.NDArray[np.bool_]:
    """Return a mask of the buffers that are always live, or can be treated so without raising the bound.

    A packing for extended lifetimes is valid for the real ones, too; that no such packing exists proves
    nothing. Buffers live in more than half of all sections are tried, the longest-lived first.

    Args:
        cut: the sections of the buffers.
        size: the size of each buffer.
    """
    always, live = always_live(cut), cut.live.copy()
    length = cut.last - cut.first
    for index in np.argsort(-length, kind="stable").tolist():
        first, last = int(cut.first[index]), int(cut.last[index])
        if always[index]:
            continue
        if 2 * (last - first) <= cut.count:
            break
        absent = (slice(max(last - cut.count, 0), first), slice(last, None))
        if all(live[span].max(initial=0) + size[index] <= cut.bound for span in absent):
            always[index] = True
            for span in absent:
                live[span] += size[index]
    return always
