"""What an arena logged, as a trace: ``memfit pack`` reads it, and ``memfit replay`` and ``memfit explain``.

An arena takes PyTorch's own allocator's place, and with it its history.
"""

import sys
from collections.abc import Sequence

import numpy as np

from memfit.arenas.native import FREED
from memfit.packing.buffers import Column
from memfit.records import (
    ARENA,
    DEFAULT_POOL,
    Action,
    DeviceUse,
    Events,
    Mark,
    MarkKind,
    Note,
    Provenance,
    ScriptEnd,
    Trace,
)
from memfit.versions import versions

_CUT = "The history was full before the run ended: what came later is not in it."


def trace_of(rows: Column, steps: Sequence[int], device: DeviceUse, *, is_cut: bool = False) -> Trace:
    """Return what was logged as a trace.

    Args:
        rows: of address, size (or ``FREED``), time in microseconds and lane, in their order.
        steps: how many of them there were when each training step ended.
        device: whose memory it is.
        is_cut: whether more was asked for than the log holds.

    Returns:
        A trace without labels. A free is two events there; one of memory that is older than the log is none.
    """
    sizes = _sizes(rows)
    known = sizes > 0
    is_free = rows[known, 1] == FREED
    at = np.repeat(np.flatnonzero(known), np.where(is_free, 2, 1))  # row of each event
    again = np.append(False, at[1:] == at[:-1])
    freed = np.where(again, Action.FREE_COMPLETED, Action.FREE_REQUESTED)
    action = np.where(rows[at, 1] == FREED, freed, Action.ALLOC)
    lanes, stream = np.unique(rows[at, 3], return_inverse=True)
    seen = np.argsort(np.argsort([np.flatnonzero(stream == lane)[0] for lane in range(len(lanes))]))
    nothing = np.full(len(at), -1, np.int32)
    events = Events(
        action=action.astype(np.uint8),
        address=rows[at, 0].astype(np.uint64),
        size=sizes[at],
        stream=seen[stream].astype(np.int32) if len(lanes) else nothing,
        time=rows[at, 2],
        label=nothing,
        stack=nothing,
        category=np.zeros(len(at), np.uint8),
        pool=np.zeros(len(at), np.int32),
    )
    positions = np.searchsorted(at, steps).tolist()
    return Trace(
        events=events,
        labels=(),
        stacks=(),
        frames=(),
        marks=tuple(Mark(where, MarkKind.TRAINING_STEP, index) for index, where in enumerate(positions)),
        segments=(),
        device=device,
        end=ScriptEnd("steps", 0),
        settings={"backend": ARENA},
        statistics={},
        versions=versions(),
        command=tuple(sys.argv),
        pools=(DEFAULT_POOL,),
        notes=(Note(Provenance.EXACT, _CUT, sizes=True),) if is_cut else (),
    )


def _sizes(rows: Column) -> Column:
    """Return each row's bytes: a free's are its allocation's; 0 where that is older than the log."""
    living: dict[int, int] = {}
    sizes = rows[:, 1].copy()
    for row, (address, size) in enumerate(rows[:, :2].tolist()):
        if size == FREED:
            sizes[row] = living.pop(address, 0)
        else:
            living[address] = size
    return sizes
