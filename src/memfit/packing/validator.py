"""Whether a packing is one, told without any of the packers' code."""

import heapq
from bisect import bisect_left

import numpy as np

from memfit.packing.buffers import Buffers, Column


def wrong(buffers: Buffers, offset: Column, capacity: int) -> str:
    """Say what is wrong with a packing; empty if nothing is.

    A sweep over time holds the buffers that live, by offset: each new one must fit between its neighbours.
    """
    if len(offset) != len(buffers):
        return f"{len(offset)} offsets for {len(buffers)} buffers"
    end = offset + buffers.size
    for what, bad in (("lies below 0", offset < 0), ("ends beyond the capacity", end > capacity)):
        if bad.any():
            return f"{_called(buffers, int(np.argmax(bad)))} {what}"
    lower, upper, whose = buffers.pieces()
    leaving: list[tuple[int, int]] = []
    alive = _Alive()
    for piece in np.argsort(lower, kind="stable").tolist():
        while leaving and leaving[0][0] <= lower[piece]:
            alive.remove(heapq.heappop(leaving)[1])
        index = int(whose[piece])
        met = alive.add(int(offset[index]), int(end[index]), index)
        if met is not None:
            return f"{_called(buffers, index)} and {_called(buffers, met)} meet"
        heapq.heappush(leaving, (int(upper[piece]), int(offset[index])))
    return ""


class _Alive:
    """Buffers that live now and do not meet, by offset."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._of: dict[int, tuple[int, int]] = {}  # offset -> end, buffer

    def add(self, offset: int, end: int, buffer: int) -> int | None:
        """Add a buffer; return one that it meets instead, if there is."""
        position = bisect_left(self._offsets, offset)
        for neighbour in self._offsets[max(position - 1, 0) : position + 1]:
            its_end, other = self._of[neighbour]
            if neighbour < end and offset < its_end:
                return other
        self._offsets.insert(position, offset)
        self._of[offset] = end, buffer
        return None

    def remove(self, offset: int) -> None:
        del self._offsets[bisect_left(self._offsets, offset)]
        del self._of[offset]


def _called(buffers: Buffers, index: int) -> str:
    name = buffers.names[index] if buffers.names else str(index)
    return f"{name} [{buffers.lower[index]}, {buffers.upper[index]})"
