"""Check packings, independently of the packers' code."""

import heapq
from bisect import bisect_left

import numpy as np

from memfit.packing.buffer_lifetimes import Buffers, Column


def find_packing_violation(buffers: Buffers, offset: Column, capacity: int) -> str:
    """Return a description of the first violation found; empty if the packing is valid.

    A sweep over time keeps the live buffers sorted by offset: each new one must fit between its neighbours.
    """
    if len(offset) != len(buffers):
        return f"{len(offset)} offsets for {len(buffers)} buffers"
    end = offset + buffers.size
    for fault, bad in (("begins below 0", offset < 0), ("ends beyond the capacity", end > capacity)):
        if bad.any():
            return f"{_describe(buffers, int(np.argmax(bad)))} {fault}"
    lower, upper, owner = buffers.pieces()
    ending: list[tuple[int, int]] = []
    live = _LiveBuffers()
    for piece in np.argsort(lower, kind="stable").tolist():
        while ending and ending[0][0] <= lower[piece]:
            live.remove(heapq.heappop(ending)[1])
        index = int(owner[piece])
        overlapping = live.add(int(offset[index]), int(end[index]), index)
        if overlapping is not None:
            return f"{_describe(buffers, index)} and {_describe(buffers, overlapping)} overlap"
        heapq.heappush(ending, (int(upper[piece]), int(offset[index])))
    return ""


class _LiveBuffers:
    """Buffers live at one moment, which do not overlap, sorted by offset."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._at: dict[int, tuple[int, int]] = {}  # offset -> end, buffer

    def add(self, offset: int, end: int, buffer: int) -> int | None:
        """Add a buffer, or return one that it overlaps without adding it."""
        position = bisect_left(self._offsets, offset)
        for neighbour_offset in self._offsets[max(position - 1, 0) : position + 1]:
            neighbour_end, neighbour = self._at[neighbour_offset]
            if neighbour_offset < end and offset < neighbour_end:
                return neighbour
        self._offsets.insert(position, offset)
        self._at[offset] = end, buffer
        return None

    def remove(self, offset: int) -> None:
        del self._offsets[bisect_left(self._offsets, offset)]
        del self._at[offset]


def _describe(buffers: Buffers, index: int) -> str:
    name = buffers.names[index] if buffers.names else str(index)
    return f"{name} [{buffers.lower[index]}, {buffers.upper[index]})"
