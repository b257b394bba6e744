"""Failed allocations, and the peak that a run's answer is about.

A script may run out of memory, catch the error, and continue with a smaller batch. What it needs is the peak
after the last such failure: the attempts before requested more than there was.
"""

import numpy as np
import numpy.typing as npt

from memfit.analysis.location import step_ends
from memfit.records import Action, Category, Timeline, Trace


def failed_allocations(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the events of the allocations that failed, except those that PyTorch itself recovered from."""
    failed = trace.events.action == Action.OOM
    return np.flatnonzero(failed & (trace.events.category != Category.WORKSPACE))


def caught_failures(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the events of failed allocations, if the script completed a training step after the last one.

    Otherwise the result is empty: the script did not recover.
    """
    failures = failed_allocations(trace)
    ends = step_ends(trace)
    recovered = len(failures) and ends and failures[-1] < ends[-1] and trace.end.reason != "out of memory"
    return failures if recovered else failures[:0]


def first_of_answer(trace: Trace, line: Timeline) -> int:
    """Return the first event that the answer is about: 0, or where the script goes on after a caught failure.

    It goes on when what the failed attempt held has been freed: until then, no allocation adds to the memory
    in use.
    """
    caught = caught_failures(trace)
    if not len(caught):
        return 0
    after = int(caught[-1]) + 1
    rises = np.flatnonzero(np.diff(line.allocated[after:]) > 0)
    return after + int(rises[0]) if len(rises) else after


def overall_peak(trace: Trace, line: Timeline) -> int:
    """Return the event after which most was allocated; 0 for a run without events."""
    first = first_of_answer(trace, line)
    return first + int(np.argmax(line.allocated[first:])) if len(line.allocated) else 0
