"""Packing problems with a known optimum: a rectangle of time and memory, cut into buffers."""

from bisect import insort

import numpy as np

from memfit.packing.buffer_lifetimes import Buffers


def gapless_problem(seed: int, count: int, length: int = 200, height: int = 10_000) -> Buffers:
    """Return ``count`` buffers whose smallest packing has ``height`` and no gaps."""
    rng = np.random.default_rng(seed)
    pieces: list[tuple[int, int, int, int]] = []  # sorted by area
    halves = [(0, length, 0, height)]
    while len(pieces) + len(halves) < count:
        for half in halves:
            insort(pieces, half, key=_area)
        lower, upper, bottom, top = pieces.pop()
        if (rng.random() < 0.5 and upper - lower > 1) or top - bottom == 1:
            at = int(rng.integers(lower + 1, upper))
            halves = [(lower, at, bottom, top), (at, upper, bottom, top)]
        else:
            at = int(rng.integers(bottom + 1, top))
            halves = [(lower, upper, bottom, at), (lower, upper, at, top)]
    pieces += halves
    order = rng.permutation(len(pieces))
    lower, upper, bottom, top = np.array(pieces, np.int64)[order].T
    return Buffers(lower.copy(), upper.copy(), top - bottom, tuple(f"b{n}" for n in range(count)))


def _area(piece: tuple[int, int, int, int]) -> int:
    lower, upper, bottom, top = piece
    return (upper - lower) * (top - bottom)
