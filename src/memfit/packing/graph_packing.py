"""A graph's memory, packed: each device's into an arena of its own."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from memfit.errors import UsageError
from memfit.packing.alias_sets import AliasSet, alias_sets
from memfit.packing.best_packing import Packing
from memfit.packing.buffers import Buffers
from memfit.packing.lifetimes import ALIGNMENT
from memfit.packing.run_packing import Arenas, pack_each
from memfit.records import Dataflow


@dataclass(frozen=True, slots=True, eq=False)
class DeviceArena:
    """Memory of one device."""

    device: str
    """``cuda:0``, ``cpu``."""
    packing: Packing
    """A buffer's name is that of its set's first value."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedGraph(Arenas):
    """The memory of a graph's values, packed.

    What is given to the graph is not in it: it is there before the graph runs and after, and where it lies is
    not for a plan of the graph to say.
    """

    arenas: tuple[DeviceArena, ...]
    sets: tuple[AliasSet, ...]
    """All of the graph's, what is given to it too; times are positions of nodes."""

    @property
    def live(self) -> int:
        """Bytes that live at once, at most; the sum of each device's."""
        return sum(arena.packing.live for arena in self.arenas)

    @property
    def given(self) -> int:
        """Bytes of inputs, parameters and constants."""
        return sum(found.size for found in self.sets if found.given)


def pack_graph(
    flow: Dataflow,
    *,
    capacity: int | None = None,
    seconds: float,
    on_progress: Callable[[str], None] = lambda _: None,
) -> PackedGraph:
    """Pack what a graph makes.

    Args:
        flow: what it makes and uses.
        capacity: bytes that are enough for all arenas; None: as few as there can be.
        seconds: that are spent at most, about.
        on_progress: called with what is being tried.

    Raises:
        UsageError: it makes nothing.
    """
    sets = alias_sets(flow)
    own = [found for found in sets if found.size and not found.given]
    if not own:
        raise UsageError("There is nothing to pack: the graph makes no tensor with memory of its own.")
    devices = list(dict.fromkeys(found.device for found in own))
    groups = [_buffers([found for found in own if found.device == device]) for device in devices]
    packings = pack_each(groups, capacity, seconds=seconds, on_progress=on_progress)
    return PackedGraph(tuple(map(DeviceArena, devices, packings)), sets)


def _buffers(sets: list[AliasSet]) -> Buffers:
    lower, upper, size = np.array([(found.begin, found.end, found.size) for found in sets], np.int64).T
    rounded = -(-size // ALIGNMENT) * ALIGNMENT
    return Buffers(lower.copy(), upper.copy(), rounded, tuple(found.names[0] for found in sets))
