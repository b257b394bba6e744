"""What is packed: buffers, each with a life and a size.

    offset
      ^        ┌─────────┐
      │        │ c       │              a  lives in [0, 7)
      │  ┌─────┴───┬─────┴──┐           b  lives in [1, 4)
      │  │ b       │ d      │           c  lives in [3, 6)
      ├──┴─────────┴────┬───┘           d  lives in [4, 7)
      │ a               │
      └─┬──┬──┬──┬──┬──┬──> time
        1  2  3  4  5  6

Lives are half-open, ``[lower, upper)``: d begins where b ends, and they never meet. What repeats is a circle
of time: with a period of 7, what lives in [5, 9) lives at 5, 6, 0 and 1.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Columns of equal length ``n``; whoever makes them sees to ``lower < upper`` and ``size > 0``."""

    lower: Column
    upper: Column
    size: Column
    """Bytes, or whatever the capacity is counted in."""
    names: tuple[str, ...]
    period: int = 0
    """Length of the circle of time, from 0 on: lives begin within it and go at most once around; 0 if time is
    a line."""

    def __len__(self) -> int:
        return len(self.size)

    def where(self, which: npt.NDArray[np.bool_]) -> "Buffers":
        """Return some of them."""
        names = tuple(itertools.compress(self.names, which))
        return Buffers(self.lower[which], self.upper[which], self.size[which], names, self.period)

    def pieces(self) -> tuple[Column, Column, Column]:
        """Return ``lower`` and ``upper`` of lives that end where the circle does, and whose each is.

        A life that goes beyond it is two: until the end, and from the beginning on.
        """
        beyond = np.flatnonzero(self.upper > self.period) if self.period else np.zeros(0, np.int64)
        upper = self.upper.copy()
        upper[beyond] = self.period
        return (
            np.concatenate([self.lower, np.zeros(len(beyond), np.int64)]),
            np.concatenate([upper, self.upper[beyond] - self.period]),
            np.concatenate([np.arange(len(self)), beyond]),
        )


def joined(parts: Sequence[Buffers]) -> Buffers:
    """Return the buffers of several, which have the same time.

    Args:
        parts: at least one.
    """
    lower, upper, size = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("lower", "upper", "size")
    )
    return Buffers(lower, upper, size, tuple(name for part in parts for name in part.names), parts[0].period)


@dataclass(frozen=True, slots=True, eq=False)
class Sections:
    """Time, cut so that no more is left of it than matters.

    A section stands for a moment at which a set of buffers lives that no other moment's set contains: after a
    life has begun, and before the next one ends. There are at most as many as buffers.
    """

    count: int
    first: npt.NDArray[np.int32]
    """A buffer lives in the sections ``[first, last)``; on a circle the first ones follow the last one."""
    last: npt.NDArray[np.int32]
    live: Column
    """Bytes that live in each section."""

    @property
    def bound(self) -> int:
        """No packing needs less than the peak of what lives at once."""
        return int(self.live.max(initial=0))


def sections(buffers: Buffers) -> Sections:
    """Cut the buffers' time into sections.

    >>> abc = Buffers(np.array([0, 1, 3]), np.array([7, 4, 6]), np.array([4, 2, 1]), ("a", "b", "c"))
    >>> found = sections(abc)
    >>> found.count, found.bound
    (1, 7)
    """
    lower, upper, whose = buffers.pieces()
    times = np.concatenate([upper, lower])
    begins = np.repeat([False, True], len(whose))
    order = np.lexsort((begins, times))  # at the same time, ends come first: lives are half-open
    times, begins = times[order], begins[order]
    ends_next = np.append(~begins[1:], True) if len(begins) else begins
    moments = times[begins & ends_next]
    first = np.searchsorted(moments, lower, "left")
    last = np.searchsorted(moments, upper, "left")
    change = np.zeros(len(moments) + 1, np.int64)
    np.add.at(change, first, buffers.size[whose])
    np.add.at(change, last, -buffers.size[whose])
    live = np.cumsum(change)[: len(moments)]
    count = len(buffers)
    first, last, beyond = first[:count], last[:count], last[count:]
    last[whose[count:]] += beyond  # of a life in two pieces, the first ends with the last section
    return Sections(len(moments), first.astype(np.int32), last.astype(np.int32), live)
