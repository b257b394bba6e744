"""From the allocator's history to the bytes allocated and reserved after each event.

The history records every address but only requested sizes; ``block_tracker.py`` derives the rest.
"""

import numpy as np

from memfit.allocator.block_tracker import BlockTracker
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.reconstruct_initial_state import reconstruct_initial_state, reserved_bytes_changes
from memfit.errors import FileFormatError, UsageError
from memfit.records import Action, MarkKind, Timeline, Trace


def memory_timeline(trace: Trace) -> Timeline:
    """Return the bytes allocated and reserved after each event, as PyTorch counts them.

    Args:
        trace: events, settings and the segments at the end. If the history begins late (a snapshot
            of a process that was already running), the earlier state is derived from the end: see
            ``reconstruct_initial_state``.

    Returns:
        ``torch.cuda.memory_allocated()`` and ``memory_reserved()`` after each event, to the byte.
        Allocations from before the history (``EARLIER``) come first, each counted at its event.
        If PyTorch keeps no cache (``backend:cudaMallocAsync``, no caching), both are the sum of
        the sizes that were allocated and not yet freed.
    """
    try:
        config = AllocatorConfig.read(trace.settings)
    except UsageError as error:
        raise FileFormatError(f"Cannot replay this trace: {error}") from None
    start = reconstruct_initial_state(trace, config)
    tracker = BlockTracker(trace.events, config, start)
    tracker.advance_to(len(trace.events))
    sizes = np.array(tracker.change, np.int64)
    allocated = start.allocated - sum(tracker.earlier.values()) + np.cumsum(sizes)
    reserved = (
        start.reserved + np.cumsum(reserved_bytes_changes(trace.events)) if config.has_segments else allocated
    )
    born = np.isin(trace.events.action, (Action.ALLOC, Action.EARLIER))
    return Timeline(
        allocated=allocated,
        reserved=reserved,
        block_size=np.where(born, sizes, 0),
        freed_by=np.array(tracker.freed_by, np.int64),
    )


def timeline_disagreement_with_pytorch(trace: Trace, derived: Timeline) -> str:
    """Compare a timeline with PyTorch's own statistics, the referee.

    Args:
        trace: its ``statistics`` are ``torch.cuda.memory_stats()`` after the last event; missing
            ones are not compared. Peaks are those since the last ``RESET_PEAK`` mark.
        derived: what ``timeline(trace)`` returned.

    Returns:
        One sentence that names both figures, or the empty string if all agree.
    """
    reset = max((mark.position for mark in trace.marks if mark.kind is MarkKind.RESET_PEAK), default=0)
    columns = {"allocated": derived.allocated, "reserved": derived.reserved}
    if not AllocatorConfig.read(trace.settings).has_segments:
        del columns["reserved"]  # the history does not record the segments of CUDA's own pool
    for name, column in columns.items():
        # A reset sets the peak to what is in use then: the level after the event before the mark.
        level = np.concatenate((np.zeros(1, np.int64), column))[reset:]
        for what, figure in (("current", int(level[-1])), ("peak", int(level.max()))):
            counted = trace.statistics.get(f"{name}_bytes.all.{what}", figure)
            if counted != figure:
                return (
                    f"PyTorch counted {counted:,} bytes as {name} ({what}), but its allocator history gives "
                    f"{figure:,}."
                )
    return ""
