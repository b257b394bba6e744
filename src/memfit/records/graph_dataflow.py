"""The values of a graph of operations, with their lifetimes and memory, independent of the graph's type.

moment    node                          values            [begin, end)    shares storage with
0         x                             0  x              [0, 2)
1         linear = addmm(b, x, w)       1  linear         [1, 4)
2         split = split(linear, 4)      2  split[0]       [2, 4)          1
                                        3  split[1]       [2, 4)          2
3         add_(split[0], linear)        4  add_           [3, 5)          2
4         output = add_
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GraphValue:
    """A tensor that a node returns; one for each element of a list or tuple."""

    name: str
    """The node's name, with the position in its result: ``split[1]``."""
    begin: int
    """The node's position in the graph: the value is alive from here on."""
    end: int
    """After the last node that uses it (the interval is half-open), or the graph's end if returned."""
    size: int
    """Bytes of its whole storage, not of its elements."""
    device: str
    """``cuda:0``, ``cpu``."""
    given: bool
    """Whether its memory is not the graph's own: an input, a parameter, a constant, or a view of these."""


@dataclass(frozen=True, slots=True)
class Dataflow:
    """The values of a graph."""

    values: tuple[GraphValue, ...]
    """In the order in which nodes return them."""
    shared: tuple[tuple[int, int], ...]
    """Pairs of values that share a storage; pairs that follow from others may be missing."""
