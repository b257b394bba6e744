"""Buffers told apart, so that each part may be packed for itself.

    │ part 0  │ part 1 │ part 2  │     nothing lives on from one part to the next
    ├─────────┴────────┴─────────┤
    │ lives always               │     may be at the bottom: whatever else lives is either below it or above
    └────────────────────────────┘

Forwards that come one after another share weights alone: each is a part, and one like the other. So are the
micro-batches of a step that accumulates gradients, once those are taken to live always; see ``stretched``.
"""

import numpy as np
import numpy.typing as npt

from memfit.packing.buffers import Column, Sections


def apart(cut: Sections, always: npt.NDArray[np.bool_]) -> Column:
    """Return the part, from 0, of each buffer that does not live always.

    Args:
        cut: the buffers' time.
        always: which of them are at the bottom: ``lives_always(cut)``, or ``stretched``.

    >>> from memfit.packing.buffers import Buffers, sections
    >>> rows = Buffers(np.array([0, 0, 3, 4]), np.array([9, 3, 5, 9]), np.array([4, 2, 1, 1]), tuple("abcd"))
    >>> cut = sections(rows)
    >>> apart(cut, lives_always(cut)).tolist()
    [0, 1, 1]
    """
    first, last = cut.first[~always], cut.last[~always]
    # A life holds together what is before and after each section it has, but for its first. On a circle it
    # may go on beyond the last section, and is counted in the second half, which stands for the first.
    change = np.zeros(2 * cut.count + 1, np.int64)
    np.add.at(change, first + 1, 1)
    np.add.at(change, last, -1)
    held = np.cumsum(change)[:-1].reshape(2, cut.count).sum(axis=0)
    begins = np.flatnonzero(held == 0)
    # What begins before the first part does is in the last one, which goes on over the circle's end.
    inside = (np.searchsorted(begins, first, "right") - 1) % max(len(begins), 1)
    return np.unique(inside, return_inverse=True)[1]


def lives_always(cut: Sections) -> npt.NDArray[np.bool_]:
    """Return which buffers are in every section."""
    return cut.last - cut.first >= cut.count


def stretched(cut: Sections, size: Column) -> npt.NDArray[np.bool_]:
    """Return which buffers live always, or may be taken to: the bound is no higher for it.

    A packing of longer lives is one of the shorter, too; but that there is none proves nothing. Lives of more
    than half of all sections are tried, the longest first.

    Args:
        cut: the buffers' time.
        size: theirs.
    """
    always, live = lives_always(cut), cut.live.copy()
    length = cut.last - cut.first
    for one in np.argsort(-length, kind="stable").tolist():
        first, last = int(cut.first[one]), int(cut.last[one])
        if always[one]:
            continue
        if 2 * (last - first) <= cut.count:
            break
        absent = (slice(max(last - cut.count, 0), first), slice(last, None))
        if all(live[part].max(initial=0) + size[one] <= cut.bound for part in absent):
            always[one] = True
            for part in absent:
                live[part] += size[one]
    return always
