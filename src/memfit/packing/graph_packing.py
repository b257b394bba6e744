"""Pack the memory of a graph, each device's by itself. Values that share memory are one buffer, an alias set.

values      linear, split[0], split[1], add_      one set: split returns views, add_ writes in place
lifetimes   [1, 4)  [2, 4)    [2, 4)    [3, 5)
the set     [1, 5)                                from its first value until after the last use of any
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memfit.errors import UsageError
from memfit.packing.allocation_lifetimes import ALIGNMENT
from memfit.packing.best_packing import Packing
from memfit.packing.buffer_lifetimes import Buffers
from memfit.packing.run_packing import IndependentPackings, pack_independent_groups
from memfit.records import Dataflow
from memfit.records.printable_result import PrintableResult


class UnionFind:
    """Disjoint sets of the numbers below ``count``; at first, each number is a set of its own.

    Union by size with path compression: ``n`` operations take hardly more than ``n`` steps (Tarjan,
    "Efficiency of a Good But Not Linear Set Union Algorithm", JACM 1975).

    >>> sets = UnionFind(4)
    >>> sets.union(0, 1), sets.union(2, 1)
    (None, None)
    >>> sets.find(0) == sets.find(2), sets.find(0) == sets.find(3)
    (True, False)
    """

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))
        self._size = [1] * count

    def find(self, number: int) -> int:
        """Return the representative of a number's set, the same for all its members until the next union."""
        parent = self._parent
        root = number
        while parent[root] != root:
            root = parent[root]
        while parent[number] != root:
            parent[number], number = root, parent[number]
        return root

    def union(self, first: int, second: int) -> None:
        """Merge the sets of two numbers."""
        large, small = self.find(first), self.find(second)
        if large == small:
            return
        if self._size[large] < self._size[small]:
            large, small = small, large
        self._parent[small] = large
        self._size[large] += self._size[small]


@dataclass(frozen=True, slots=True)
class AliasSet:
    """Values that share memory."""

    names: tuple[str, ...]
    """In the order of the graph."""
    begin: int
    """The position of the first node that needs the memory."""
    end: int
    """The position of the first node that no longer needs it."""
    size: int
    """Bytes."""
    device: str
    given: bool
    """Whether the graph does not allocate the memory itself, as ``GraphValue.given``."""


def alias_sets(flow: Dataflow) -> tuple[AliasSet, ...]:
    """Return the alias sets of a graph, in the order of their first values.

    >>> from memfit.records import GraphValue
    >>> linear = GraphValue("a", 0, 2, 64, "cpu", given=False)
    >>> view = GraphValue("b", 1, 3, 64, "cpu", given=False)
    >>> [(found.names, found.begin, found.end) for found in alias_sets(Dataflow((linear, view), ((1, 0),)))]
    [(('a', 'b'), 0, 3)]
    """
    sets = UnionFind(len(flow.values))
    for first, second in flow.shared:
        sets.union(first, second)
    groups = defaultdict(list)
    for number, value in enumerate(flow.values):
        groups[sets.find(number)].append(value)
    return tuple(
        AliasSet(
            tuple(value.name for value in values),
            min(value.begin for value in values),
            max(value.end for value in values),
            max(value.size for value in values),
            values[0].device,
            any(value.given for value in values),
        )
        for values in groups.values()
    )


@dataclass(frozen=True, slots=True, eq=False)
class DevicePacking:
    """The packing of one device's memory."""

    device: str
    """``cuda:0``, ``cpu``."""
    packing: Packing
    """Each buffer is named after the first value of its alias set."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class GraphPacking(PrintableResult, IndependentPackings):
    """The packed memory of a graph's values.

    Inputs, parameters and constants are not packed: they exist before and after the graph runs, and a plan of
    the graph cannot decide their addresses.
    """

    arenas: tuple[DevicePacking, ...]
    sets: tuple[AliasSet, ...]
    """All alias sets of the graph, those of its inputs included; times are positions of nodes."""

    @property
    def live(self) -> int:
        """The peak of bytes live at once, summed over devices."""
        return sum(arena.packing.live for arena in self.arenas)

    @property
    def given(self) -> int:
        """Bytes of inputs, parameters and constants."""
        return sum(alias_set.size for alias_set in self.sets if alias_set.given)


def pack_graph(
    flow: Dataflow,
    *,
    capacity: int | None = None,
    seconds: float,
    on_progress: Callable[[str], None] = lambda _: None,
) -> GraphPacking:
    """Pack the memory that a graph allocates.

    Args:
        flow: the values of the graph.
        capacity: bytes that are enough for all devices together; None: as few as possible.
        seconds: approximate time limit.
        on_progress: called with a description of each attempt.
    """
    sets = alias_sets(flow)
    own = [alias_set for alias_set in sets if alias_set.size and not alias_set.given]
    if not own:
        raise UsageError("There is nothing to pack: the graph allocates no memory of its own.")
    devices = list(dict.fromkeys(alias_set.device for alias_set in own))
    groups = [_buffers([alias_set for alias_set in own if alias_set.device == device]) for device in devices]
    packings = pack_independent_groups(groups, capacity, seconds=seconds, on_progress=on_progress)
    return GraphPacking(tuple(map(DevicePacking, devices, packings)), sets)


def _buffers(sets: list[AliasSet]) -> Buffers:
    rows = [(alias_set.begin, alias_set.end, alias_set.size) for alias_set in sets]
    lower, upper, size = np.array(rows, np.int64).T
    rounded = -(-size // ALIGNMENT) * ALIGNMENT
    return Buffers(lower.copy(), upper.copy(), rounded, tuple(alias_set.names[0] for alias_set in sets))
