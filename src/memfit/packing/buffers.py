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

Lives are half-open, ``[lower, upper)``: d begins where b ends, and they never meet.
"""

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

    def __len__(self) -> int:
        return len(self.size)


@dataclass(frozen=True, slots=True, eq=False)
class Sections:
    """Time, cut so that no more is left of it than matters.

    A section stands for a moment at which a set of buffers lives that no other moment's set contains: after a
    life has begun, and before the next one ends. There are at most as many as buffers.
    """

    count: int
    first: npt.NDArray[np.int32]
    """A buffer lives in the sections ``[first, last)``."""
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
    times = np.concatenate([buffers.upper, buffers.lower])
    begins = np.repeat([False, True], len(buffers))
    order = np.lexsort((begins, times))  # at the same time, ends come first: lives are half-open
    times, begins = times[order], begins[order]
    ends_next = np.append(~begins[1:], True) if len(begins) else begins
    moments = times[begins & ends_next]
    first = np.searchsorted(moments, buffers.lower, "left")
    last = np.searchsorted(moments, buffers.upper, "left")
    change = np.zeros(len(moments) + 1, np.int64)
    np.add.at(change, first, buffers.size)
    np.add.at(change, last, -buffers.size)
    return Sections(
        len(moments), first.astype(np.int32), last.astype(np.int32), np.cumsum(change)[: len(moments)]
    )
