r"""The moments just below the peak: what limits a run next, once its peak is lowered.

allocated     /\  peak
             /  \       /\  near: apart from the peak by a dip, and not far below it
         /\_/    \     /  \
        /         \___/    \
        not apart
"""

import numpy as np

from memfit.analysis.location import location_at, step_ends
from memfit.records import MemoryPeak, Timeline, Trace

MOST = 3
APART = 0.05
"""Of the peak, that memory falls by between two moments that are not one."""
NEAR = 0.75
"""Of the peak, that a moment holds at least."""


def secondary_peaks(trace: Trace, line: Timeline) -> tuple[MemoryPeak, ...]:
    """Return the highest moments of the peak's own training step that are apart from it and one another.

    Args:
        trace: what was recorded.
        line: its timeline.
    """
    if not len(line.allocated):
        return ()
    peak = int(np.argmax(line.allocated))
    ends = step_ends(trace)
    step = int(np.searchsorted(ends, peak, side="right"))
    begin = ends[step - 1] if step else 0
    end = ends[step] if step < len(ends) else None
    level, label = line.allocated[begin:end], trace.events.label[begin:end]
    far = level >= NEAR * line.allocated[peak]
    found: list[int] = []
    at = peak - begin
    for _ in range(MOST):
        # The lowest level between each moment and the one found last, looking both ways from that.
        after = np.minimum.accumulate(level[at:])
        before = np.minimum.accumulate(level[at::-1])[:0:-1]
        far &= level - np.concatenate((before, after)) >= APART * line.allocated[peak]
        far &= label != label[at]  # the same code again tells nothing new
        if not far.any():
            break
        at = int(np.argmax(np.where(far, level, -1)))
        found.append(begin + at)
    return tuple(MemoryPeak(event, location_at(trace, event), int(line.allocated[event])) for event in found)
