"""What each phase of a run added to memory: the ledger that engineers keep by hand.

setup       parameters +4,194,304   inputs +4,096
forward     outputs +4,096
loss        outputs +512
backward    gradients +4,194,304
optimizer   optimizer state +8,388,608                  at its peak 8,388,608 more
"""

import numpy as np
import numpy.typing as npt

from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.analysis.location import step_ends, step_of
from memfit.records import Action, Attribution, Category, Phase, PhaseChange, Timeline, Trace

_PHASES = tuple(Phase)


def phase_ledger(
    trace: Trace, line: Timeline, attribution: Attribution, steps: int = 2
) -> tuple[PhaseChange, ...]:
    """Return what each stretch of a phase changed, up to the end of ``steps`` training steps.

    Consecutive calls of modules are one forward; recomputations are part of their backward.
    """
    ends = step_ends(trace)
    events = len(trace.events) if len(ends) <= steps else ends[steps - 1]
    phase = attribution.phase_of_event[:events].copy()
    phase[phase == _PHASES.index(Phase.RECOMPUTE)] = _PHASES.index(Phase.BACKWARD)
    if not events:
        return ()
    first = int(
        np.argmax(trace.events.action != Action.EARLIER)
    )  # allocations from before the history are no change
    edges = np.flatnonzero(np.diff(phase[first:])) + 1 + first
    begins, stops = [first, *edges.tolist()], [*edges.tolist(), events]
    levels = by_category(attribution, len(trace.events))
    changes = []
    for begin, stop in zip(begins, stops, strict=True):
        before = levels[:, begin - 1] if begin else np.zeros(len(Category), np.int64)
        more = levels[:, stop - 1] - before
        after = int(line.allocated[stop - 1])
        was = int(line.allocated[begin - 1]) if begin else 0
        found = _PHASES[phase[begin]]
        changes.append(
            PhaseChange(
                step=step_of(trace, begin, found),
                phase=found,
                by_category=tuple(
                    (CATEGORY_NAMES[kind], int(more[kind])) for kind in CATEGORY_NAMES if more[kind]
                ),
                change=after - was,
                peak=int(line.allocated[begin:stop].max()),
                after=after,
            )
        )
    return tuple(changes)


def by_category(attribution: Attribution, events: int) -> npt.NDArray[np.int64]:
    """Return the bytes of allocated blocks: one row per ``Category``, one column per event."""
    levels = np.zeros((len(Category), events + 1), np.int64)
    np.add.at(levels, (attribution.category, attribution.born), attribution.block)
    np.subtract.at(levels, (attribution.category, attribution.freed), attribution.block)
    return np.cumsum(levels[:, :events], axis=1)
