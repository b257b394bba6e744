"""Problems whose smallest packing is known: a rectangle of time and space, cut until nothing is left over."""

import numpy as np

from memfit.packing.buffers import Buffers


def cut(seed: int, count: int, length: int = 200, height: int = 10_000) -> Buffers:
    """Return ``count`` buffers that fill an arena of ``height`` without a gap."""
    dice = np.random.default_rng(seed)
    pieces = [(0, length, 0, height)]
    while len(pieces) < count:
        pieces.sort(key=lambda piece: (piece[1] - piece[0]) * (piece[3] - piece[2]))
        lower, upper, bottom, top = pieces.pop()
        if (dice.random() < 0.5 and upper - lower > 1) or top - bottom == 1:
            at = int(dice.integers(lower + 1, upper))
            pieces += [(lower, at, bottom, top), (at, upper, bottom, top)]
        else:
            at = int(dice.integers(bottom + 1, top))
            pieces += [(lower, upper, bottom, at), (lower, upper, at, top)]
    order = dice.permutation(len(pieces))
    lower, upper, bottom, top = np.array(pieces, np.int64)[order].T
    return Buffers(lower.copy(), upper.copy(), top - bottom, tuple(f"b{n}" for n in range(count)))
