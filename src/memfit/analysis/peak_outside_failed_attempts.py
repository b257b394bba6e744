"""Failed allocations, and the peak that a run's answer is about.

A script may run out of memory, catch the error, and continue with a smaller batch. What it needs is the peak
after the last such failure: the attempts before requested more than there was.
"""

import numpy as np
import numpy.typing as npt

from memfit.analysis.event_locations import step_end_events
from memfit.records import Action, Category, Timeline, Trace


def failed_allocation_events(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the events of the allocations that failed, except those that PyTorch itself recovered from."""
    failed = trace.events.action == Action.OOM
    return np.flatnonzero(failed & (trace.events.category != Category.WORKSPACE))


def caught_failure_events(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the events of failed allocations, if the script completed a training step after the last one.

    Otherwise the result is empty: the script did not recover.
    """
    failures = failed_allocation_events(trace)
    ends = step_end_events(trace)
    recovered = len(failures) and ends and failures[-1] < ends[-1] and trace.end.reason != "out of memory"
    return failures if recovered else failures[:0]


def events_outside_failed_attempts(trace: Trace, line: Timeline) -> npt.NDArray[np.bool_]:
    """Return the events that the answer is about: all but those of attempts whose failure the script caught.

    An attempt begins where the training step before it ended. It ends when what it held has been freed: until
    then, no allocation adds to the memory in use.
    """
    answered = np.ones(len(trace.events), np.bool_)
    starts = np.array([0, *step_end_events(trace)])
    rises = np.flatnonzero(np.diff(line.allocated) > 0)
    for failure in caught_failure_events(trace).tolist():
        start = int(starts[np.searchsorted(starts, failure, side="right") - 1])
        later = np.searchsorted(rises, failure + 1)
        answered[start : int(rises[later]) if later < len(rises) else failure + 1] = False
    return answered


def peak_event_outside_failed_attempts(trace: Trace, line: Timeline) -> int:
    """Return the event after which most was allocated; 0 for a run without events."""
    return event_of_highest_level(line.allocated, events_outside_failed_attempts(trace, line))


def event_of_highest_level(level: npt.NDArray[np.int64], answered: npt.NDArray[np.bool_]) -> int:
    """Return the first of the answered events after which a level is highest; 0 for a run without events."""
    return int(np.argmax(np.where(answered, level, -1))) if len(level) else 0
