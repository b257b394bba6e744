r"""Secondary peaks: the moments that limit a run next, once its peak is lowered.

allocated     /\  peak
             /  \       /\  secondary: separated by a dip, and not far below
         /\_/    \     /  \
        /         \___/    \
        not separated
"""

import numpy as np

from memfit.analysis.location import location_at, step_ends
from memfit.analysis.overall_peak import overall_peak
from memfit.records import MemoryPeak, Timeline, Trace

MOST = 3
APART = 0.05
"""Share of the peak by which memory falls between two separate peaks."""
NEAR = 0.75
"""Share of the peak that a secondary peak reaches at least."""


def secondary_peaks(trace: Trace, line: Timeline) -> tuple[MemoryPeak, ...]:
    """Return the highest separate peaks in the training step of the peak, highest first.

    Args:
        trace: what was recorded.
        line: its timeline.
    """
    if not len(line.allocated):
        return ()
    peak = overall_peak(trace, line)
    ends = step_ends(trace)
    step = int(np.searchsorted(ends, peak, side="right"))
    begin = ends[step - 1] if step else 0
    end = ends[step] if step < len(ends) else None
    level, label = line.allocated[begin:end], trace.events.label[begin:end]
    far = level >= NEAR * line.allocated[peak]
    found: list[int] = []
    at = peak - begin
    for _ in range(MOST):
        # The lowest level between each moment and the peak found last, in both directions.
        after = np.minimum.accumulate(level[at:])
        before = np.minimum.accumulate(level[at::-1])[:0:-1]
        far &= level - np.concatenate((before, after)) >= APART * line.allocated[peak]
        far &= label != label[at]  # another peak of the same code adds nothing
        if not far.any():
            break
        at = int(np.argmax(np.where(far, level, -1)))
        found.append(begin + at)
    return tuple(MemoryPeak(event, location_at(trace, event), int(line.allocated[event])) for event in found)
