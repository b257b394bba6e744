"""Exhaustive search for hard packings: does any packing fit in this capacity?

An independent implementation after Moffitt, "MiniMalloc: A Lightweight Memory Allocator for
Hardware-Accelerated Machine Learning" (ASPLOS 2023). How the search tree is pruned:

- Buffers are placed from the bottom up: each rests on what is below it, at no lower offset than the buffer
  placed before it. Letting every buffer of a packing fall brings it into that order, so nothing is lost.
- Of buffers that could be placed at the same offset, those ranked lower wait until after the others: swapping
  two neighbours in the order gives the same packing, and only one of the two orders is visited.
- A buffer whose offset would be at or above where another one could *end* leaves a gap that the other fits
  into: placing the other one first is no worse.
- Each section has a floor below which nothing more fits. Where the floor and the bytes still to be placed in
  the section exceed the capacity, the search backtracks.
- When the buffer just placed was the last one to connect two spans of time, each span is searched on its own.

The order of the attempts decides whether the search ends within a second or a year, and no order is good for
every problem: three orders take turns, each with twice as many nodes as in its previous turn.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from memfit.packing.buffer_lifetimes import Buffers, Column, LifetimeSections
from memfit.packing.c_packers import FOUND, INFEASIBLE, NODE_LIMIT, run_exhaustive_search

PREFERENCES = ("LAT", "TAL", "TLA")
"""Orders of the attempts. Sort keys, largest first: L(ifetime), A(rea), T(otal of the buffer's fullest
section)."""
MAX_BUFFERS = 4_000
"""Problems with more buffers are not searched: the search needs memory quadratic in their number."""


@dataclass(frozen=True, slots=True)
class PackingSearchResult:
    """The result of a search. Without offsets and a proof, the time ran out, or the problem is too large."""

    offset: Column | None = None
    """The offset of each buffer; None unless found."""
    is_infeasible: bool = False
    """Whether it is proved that no such packing exists."""
    nodes: int = 0
    """Nodes of the search tree that were visited."""


def search_packing_within_capacity(
    buffers: Buffers,
    cut: LifetimeSections,
    capacity: int,
    deadline: float,
    on_progress: Callable[[int], None] = lambda _: None,
) -> PackingSearchResult:
    """Search for offsets within a capacity.

    Args:
        buffers: at least one; more than ``MAX_BUFFERS`` are not searched.
        cut: ``sections(buffers)``.
        capacity: no buffer may end beyond it.
        deadline: when to give up (``time.monotonic``).
        on_progress: called with the number of nodes visited so far, after each turn.
    """
    if cut.bound > capacity:
        return PackingSearchResult(is_infeasible=True)
    if len(buffers) > MAX_BUFFERS:
        return PackingSearchResult()
    nodes = 0
    for turn in itertools.count(1):
        for preference in PREFERENCES:
            limit = len(buffers) << turn
            status, visited, offset = run_exhaustive_search(
                buffers, cut, capacity, preference, limit, deadline
            )
            nodes += visited
            on_progress(nodes)
            if status != NODE_LIMIT or time.monotonic() >= deadline:
                return PackingSearchResult(offset if status == FOUND else None, status == INFEASIBLE, nodes)
    raise AssertionError
