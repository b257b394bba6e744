"""Alias sets: the values of a graph that share memory, and how long that memory is needed.

values      linear, split[0], split[1], add_      one set: split returns views, add_ writes in place
lifetimes   [1, 4)  [2, 4)    [2, 4)    [3, 5)
the set     [1, 5)                                from its first value until after the last use of any
"""

from collections import defaultdict
from dataclasses import dataclass

from memfit.records import Dataflow


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
