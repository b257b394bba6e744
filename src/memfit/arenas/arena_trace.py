"""The log of an arena as a trace, for ``memfit pack``, ``memfit replay`` and ``memfit explain``.

An arena replaces PyTorch's allocator, which would have recorded the history.
"""

import sys
from collections.abc import Sequence

import numpy as np

from memfit.arenas.arena_library import FREED
from memfit.packing.buffer_lifetimes import Column
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
from memfit.versions import software_versions

_CUT = "The arena's log was full before the run ended; later allocations are missing from this trace."


def trace_of_arena_log(
    rows: Column, steps: Sequence[int], device: DeviceUse, *, is_cut: bool = False
) -> Trace:
    """Return the log as a trace.

    Args:
        rows: address, size (or ``FREED``), time in microseconds and lane of each request, in order.
        steps: the number of rows when each training step ended.
        device: the device whose memory was allocated.
        is_cut: whether the log was full before the run ended.

    Returns:
        A trace without labels. A free becomes two events; a free of memory older than the log becomes none.
    """
    sizes = _sizes(rows)
    is_known = sizes > 0
    is_free = rows[is_known, 1] == FREED
    at = np.repeat(np.flatnonzero(is_known), np.where(is_free, 2, 1))  # row of each event
    is_second = np.append(False, at[1:] == at[:-1])
    freed = np.where(is_second, Action.FREE_COMPLETED, Action.FREE_REQUESTED)
    action = np.where(rows[at, 1] == FREED, freed, Action.ALLOC)
    lanes, stream = np.unique(rows[at, 3], return_inverse=True)
    first_use = np.argsort(np.argsort([np.flatnonzero(stream == lane)[0] for lane in range(len(lanes))]))
    unknown = np.full(len(at), -1, np.int32)
    events = Events(
        action=action.astype(np.uint8),
        address=rows[at, 0].astype(np.uint64),
        size=sizes[at],
        stream=first_use[stream].astype(np.int32) if len(lanes) else unknown,
        time=rows[at, 2],
        label=unknown,
        stack=unknown,
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
        versions=software_versions(),
        command=tuple(sys.argv),
        pools=(DEFAULT_POOL,),
        notes=(Note(Provenance.EXACT, _CUT, sizes=True),) if is_cut else (),
    )


def _sizes(rows: Column) -> Column:
    """Return each row's bytes; a free has the size of its allocation, or 0 if that is older than the log."""
    live: dict[int, int] = {}
    sizes = rows[:, 1].copy()
    for row, (address, size) in enumerate(rows[:, :2].tolist()):
        if size == FREED:
            sizes[row] = live.pop(address, 0)
        else:
            live[address] = size
    return sizes
