"""Random request sizes for the allocator: for every pool, and around every threshold."""

import math
import random
from collections.abc import Sequence

KIB, MIB = 1 << 10, 1 << 20
EDGES = (
    512,
    KIB,
    MIB,
    2 * MIB,
    10 * MIB,
    12 * MIB,
    18 * MIB,
    19 * MIB,
    20 * MIB,
    32 * MIB,
    100 * MIB,
    128 * MIB,
)
BESIDE = (-513, -512, -1, 0, 1, 511, 512, 513, MIB, MIB + 512, MIB - 512)


def size_of(
    kind: str,
    dice: random.Random,
    *,
    largest: int = 300 * MIB,
    edges: Sequence[int] = EDGES,
    beside: Sequence[int] = BESIDE,
) -> int:
    """Draw a size, in bytes.

    Args:
        kind: ``small`` and ``middle`` requests share segments, a ``large`` one may get its own, and ``edge``
            is near a threshold.
        dice: the random number generator.
        largest: the maximum for ``large``, in bytes.
        edges: the thresholds, in bytes.
        beside: distances from a threshold, in bytes.
    """
    if kind == "small":
        return int(math.exp(dice.uniform(0, math.log(MIB))))
    if kind == "middle":
        return dice.randint(MIB, 12 * MIB)
    if kind == "large":
        return dice.randint(8 * MIB, largest)
    return max(1, dice.choice(edges) + dice.choice(beside))
