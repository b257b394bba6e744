"""Pack the memory of a graph, each device's by itself."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memfit.errors import UsageError
from memfit.packing.alias_sets import AliasSet, alias_sets
from memfit.packing.best_packing import Packing
from memfit.packing.buffers import Buffers
from memfit.packing.lifetimes import ALIGNMENT
from memfit.packing.run_packing import IndependentPackings, pack_each
from memfit.records import Dataflow
from memfit.records.result import PrintedResult


@dataclass(frozen=True, slots=True, eq=False)
class DevicePacking:
    """The packing of one device's memory."""

    device: str
    """``cuda:0``, ``cpu``."""
    packing: Packing
    """Each buffer is named after the first value of its alias set."""


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class GraphPacking(PrintedResult, IndependentPackings):
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

    Raises:
        UsageError: the graph allocates no memory.
    """
    sets = alias_sets(flow)
    own = [alias_set for alias_set in sets if alias_set.size and not alias_set.given]
    if not own:
        raise UsageError("There is nothing to pack: the graph allocates no memory of its own.")
    devices = list(dict.fromkeys(alias_set.device for alias_set in own))
    groups = [_buffers([alias_set for alias_set in own if alias_set.device == device]) for device in devices]
    packings = pack_each(groups, capacity, seconds=seconds, on_progress=on_progress)
    return GraphPacking(tuple(map(DevicePacking, devices, packings)), sets)


def _buffers(sets: list[AliasSet]) -> Buffers:
    rows = [(alias_set.begin, alias_set.end, alias_set.size) for alias_set in sets]
    lower, upper, size = np.array(rows, np.int64).T
    rounded = -(-size // ALIGNMENT) * ALIGNMENT
    return Buffers(lower.copy(), upper.copy(), rounded, tuple(alias_set.names[0] for alias_set in sets))
