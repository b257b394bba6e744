"""Buffers to pack, each with a lifetime and a size, and the sections of time in which they are live.

    offset
      ^        ┌─────────┐
      │        │ c       │              a  is live in [0, 7)
      │  ┌─────┴───┬─────┴──┐           b  is live in [1, 4)
      │  │ b       │ d      │           c  is live in [3, 6)
      ├──┴─────────┴────┬───┘           d  is live in [4, 7)
      │ a               │
      └─┬──┬──┬──┬──┬──┬──> time
        1  2  3  4  5  6

Lifetimes are half-open intervals ``[lower, upper)``: d begins where b ends, so they never overlap. Time that
repeats is a circle: with a period of 7, a buffer with the lifetime [5, 9) is live at 5, 6, 0 and 1.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Columns of equal length ``n``; callers ensure ``lower < upper`` and ``size > 0``."""

    lower: Column
    upper: Column
    size: Column
    """Bytes, or the unit of the capacity."""
    names: tuple[str, ...]
    period: int = 0
    """Length of circular time: lifetimes begin in ``[0, period)`` and are at most one period long. 0 if time
    is linear."""

    def __len__(self) -> int:
        return len(self.size)

    def where(self, which: npt.NDArray[np.bool_]) -> "Buffers":
        """Return the buffers that a mask selects."""
        names = tuple(itertools.compress(self.names, which))
        return Buffers(self.lower[which], self.upper[which], self.size[which], names, self.period)

    def pieces(self) -> tuple[Column, Column, Column]:
        """Return lifetimes on a line: the columns ``lower`` and ``upper``, and the buffer that each is of.

        A lifetime that wraps around the period becomes two pieces: up to its end, and from its beginning.
        """
        wrapped = np.flatnonzero(self.upper > self.period) if self.period else np.zeros(0, np.int64)
        upper = self.upper.copy()
        upper[wrapped] = self.period
        return (
            np.concatenate([self.lower, np.zeros(len(wrapped), np.int64)]),
            np.concatenate([upper, self.upper[wrapped] - self.period]),
            np.concatenate([np.arange(len(self)), wrapped]),
        )


def concatenate_buffers(parts: Sequence[Buffers]) -> Buffers:
    """Return the buffers of several groups as one.

    Args:
        parts: at least one group; all have the same period.
    """
    lower, upper, size = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("lower", "upper", "size")
    )
    return Buffers(lower, upper, size, tuple(name for part in parts for name in part.names), parts[0].period)


@dataclass(frozen=True, slots=True, eq=False)
class LifetimeSections:
    """Time, reduced to the moments that matter for packing.

    A section stands for a moment whose set of live buffers no other moment's set contains: after a lifetime
    has begun and before the next one ends. There are at most as many sections as buffers.
    """

    count: int
    first: npt.NDArray[np.int32]
    """Each buffer is live in the sections ``[first, last)``. With a period, section ``count`` is section 0
    again."""
    last: npt.NDArray[np.int32]
    live: Column
    """Bytes live in each section."""

    @property
    def bound(self) -> int:
        """The peak of what is live at once: no packing is smaller."""
        return int(self.live.max(initial=0))


def lifetime_sections(buffers: Buffers) -> LifetimeSections:
    """Cut the time of some buffers into sections.

    >>> abc = Buffers(np.array([0, 1, 3]), np.array([7, 4, 6]), np.array([4, 2, 1]), ("a", "b", "c"))
    >>> found = lifetime_sections(abc)
    >>> found.count, found.bound
    (1, 7)
    """
    lower, upper, owner = buffers.pieces()
    times = np.concatenate([upper, lower])
    begins = np.repeat([False, True], len(owner))
    order = np.lexsort((begins, times))  # at equal times, ends come first: lifetimes are half-open
    times, begins = times[order], begins[order]
    ends_next = np.append(~begins[1:], True) if len(begins) else begins
    moments = times[begins & ends_next]
    first = np.searchsorted(moments, lower, "left")
    last = np.searchsorted(moments, upper, "left")
    change = np.zeros(len(moments) + 1, np.int64)
    np.add.at(change, first, buffers.size[owner])
    np.add.at(change, last, -buffers.size[owner])
    live = np.cumsum(change)[: len(moments)]
    count = len(buffers)
    first, last, wrapped_last = first[:count], last[:count], last[count:]
    last[owner[count:]] += wrapped_last  # the first piece of a wrapped lifetime ends with the last section
    return LifetimeSections(len(moments), first.astype(np.int32), last.astype(np.int32), live)
