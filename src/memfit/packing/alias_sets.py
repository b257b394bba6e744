"""Which values of a graph lie in one memory, and how long that is needed: alias sets.

values    linear, split[0], split[1], add_      one set: split's are views, add_ wrote in place
lives     [1, 4)  [2, 4)    [2, 4)    [3, 5)
the set   [1, 5)                                from its first value on, until after the last use of any
"""

from collections import defaultdict
from dataclasses import dataclass

from memfit.records import Dataflow


class UnionFind:
    """Sets of the numbers below ``count``, which are joined more and more: each is alone at first.

    The smaller set goes below the larger, and each search shortens the way for those to come: ``n`` of them
    take hardly more than ``n`` steps (Tarjan, "Efficiency of a Good But Not Linear Set Union Algorithm", JACM
    1975).

    >>> sets = UnionFind(4)
    >>> sets.union(0, 1), sets.union(2, 1)
    (None, None)
    >>> sets.find(0) == sets.find(2), sets.find(0) == sets.find(3)
    (True, False)
    """

    def __init__(self, count: int) -> None:
        self._above = list(range(count))
        self._size = [1] * count

    def find(self, number: int) -> int:
        """Return the number that stands for the set, the same for all in it until it is joined."""
        above = self._above
        root = number
        while above[root] != root:
            root = above[root]
        while above[number] != root:
            above[number], number = root, above[number]
        return root

    def union(self, one: int, other: int) -> None:
        """Make one set of those that two numbers are in."""
        large, small = self.find(one), self.find(other)
        if large == small:
            return
        if self._size[large] < self._size[small]:
            large, small = small, large
        self._above[small] = large
        self._size[large] += self._size[small]


@dataclass(frozen=True, slots=True)
class AliasSet:
    """Values that lie in one memory."""

    names: tuple[str, ...]
    """In the order in which they come."""
    begin: int
    """The moment from which the memory is needed: the position of a node."""
    end: int
    """The moment from which it is not."""
    size: int
    """Bytes."""
    device: str
    given: bool
    """Whether it is not the graph's own, as ``GraphValue.given``."""


def alias_sets(flow: Dataflow) -> tuple[AliasSet, ...]:
    """Return the alias sets of a graph, in the order of their first values.

    >>> from memfit.records import GraphValue
    >>> linear = GraphValue("a", 0, 2, 64, "cpu", given=False)
    >>> view = GraphValue("b", 1, 3, 64, "cpu", given=False)
    >>> [(found.names, found.begin, found.end) for found in alias_sets(Dataflow((linear, view), ((1, 0),)))]
    [(('a', 'b'), 0, 3)]
    """
    sets = UnionFind(len(flow.values))
    for one, other in flow.shared:
        sets.union(one, other)
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
