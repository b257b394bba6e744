"""What a graph of operations makes and uses, told without the graph: its values, and their memory.

moment    node                          values            [begin, end)    lies in
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
    """A tensor that a node gives; each one of a list or tuple."""

    name: str
    """The node's, with the position in what it gives: ``split[1]``."""
    begin: int
    """The node's position in the graph; it is there from then on."""
    end: int
    """After the last node that uses it: life is half-open, and what the graph returns lives as long as it."""
    size: int
    """Bytes of the whole storage that it lies in, not of its elements."""
    device: str
    """``cuda:0``, ``cpu``."""
    given: bool
    """Whether its memory is not the graph's own: an input, a parameter, a constant, or a view of one."""


@dataclass(frozen=True, slots=True)
class Dataflow:
    """What a graph makes and uses."""

    values: tuple[GraphValue, ...]
    """In the order in which they come."""
    shared: tuple[tuple[int, int], ...]
    """Pairs of values that lie in one storage. Not all of them: of three, two pairs tell the third."""
