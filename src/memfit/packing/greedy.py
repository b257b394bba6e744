"""Fast packers: one buffer after the other, in an order, into a gap between those that are there.

Real graphs are easy: one of these comes within half a per cent of the bound on nearly all of them.
"""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from memfit.packing.buffers import Buffers, Column, Sections
from memfit.packing.native import place

ORDERS: dict[str, Callable[[Buffers], tuple[npt.NDArray[np.number], ...]]] = {
    "size": lambda b: (b.size, b.upper - b.lower),
    "area": lambda b: (b.size * (b.upper - b.lower).astype(np.float64), b.size),
    "length": lambda b: (b.upper - b.lower, b.size),
    "start": lambda b: (-b.lower, b.size),
}
"""What comes first: the most of the first key, then of the second."""


def packings(buffers: Buffers, cut: Sections, deadline: float) -> Iterator[tuple[str, Column]]:
    """Yield what each order and each kind of gap is called, and the offsets that it gives.

    The first is always given, whatever the deadline (``time.monotonic``).
    """
    first = True
    for name, keys in ORDERS.items():
        order = np.lexsort([-key for key in reversed(keys(buffers))])
        for gap in ("lowest", "tightest"):
            until = float("inf") if first else deadline
            offset = place(buffers, cut, order, tightest=gap == "tightest", deadline=until)
            if offset is None:
                return
            yield f"by {name}, {gap} gap", offset
            first = False
