"""The exhaustive search for hard packings: is there one within this capacity?

After Moffitt, "MiniMalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine Learning" (ASPLOS
2023), written anew. What keeps it small:

- Buffers are placed from the bottom up: each comes to lie on what is below it, and none below the one placed
  before it. Any packing can be brought into that order by letting everything fall, so nothing is lost.
- Among buffers that could come to lie at the same offset, those that rank lower wait until after the others:
  swapping two neighbours in the order gives the same packing, and only one of both is looked at.
- A buffer that would come to lie above where another one could *end* leaves a gap that this one fits into:
  placing that one first is no worse.
- Each section has a floor that nothing more fits under; where the floor and what is left of the section
  exceed the capacity, the search turns back.
- When a placed buffer was the last one to hold two spans of time together, each is searched for itself.

What it tries first decides whether it ends in a second or in a year, and no order is good for all: three take
turns, each with twice the nodes of its last turn.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from memfit.packing.buffers import Buffers, Column, Sections
from memfit.packing.native import CANCELLED, FOUND, INFEASIBLE, NODE_LIMIT, search

PREFERENCES = ("LAT", "TAL", "TLA")
"""What is tried first: the most of L(ength of life), A(rea), T(otal of its fullest section), in turn."""
MOST = 4_000
"""Buffers beyond which no search is begun: its memory is quadratic in them."""


class Answer(StrEnum):
    """How a search ended."""

    FOUND = "found"
    INFEASIBLE = "infeasible"  # it is proved: there is none
    UNKNOWN = "unknown"  # time was up


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """What a search found."""

    answer: Answer
    offset: Column | None
    nodes: int


def find(
    buffers: Buffers,
    cut: Sections,
    capacity: int,
    deadline: float,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Searched:
    """Look for offsets within a capacity until ``deadline`` (``time.monotonic``).

    Args:
        buffers: at least one; more than ``MOST`` are not searched.
        cut: ``sections(buffers)``.
        capacity: that no buffer may end beyond.
        deadline: when it gives up.
        on_progress: called with the nodes looked at so far, after each turn.
    """
    if cut.bound > capacity:
        return Searched(Answer.INFEASIBLE, None, 0)
    if len(buffers) > MOST:
        return Searched(Answer.UNKNOWN, None, 0)
    nodes = 0
    for turn in itertools.count(1):
        for preference in PREFERENCES:
            limit = len(buffers) << turn
            status, looked_at, offset = search(buffers, cut, capacity, preference, limit, deadline)
            nodes += looked_at
            on_progress(nodes)
            if status == FOUND:
                return Searched(Answer.FOUND, offset, nodes)
            if status == INFEASIBLE:
                return Searched(Answer.INFEASIBLE, None, nodes)
            if status == CANCELLED or time.monotonic() >= deadline:
                return Searched(Answer.UNKNOWN, None, nodes)
            assert status == NODE_LIMIT  # noqa: S101
    raise AssertionError
