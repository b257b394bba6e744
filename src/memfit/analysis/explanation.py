"""From a trace to what ``memfit explain`` reports, but for advice: the peak, lower peaks, and each phase."""

import numpy as np
import numpy.typing as npt

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import CATEGORY_NAMES, breakdown_at, peak_event
from memfit.analysis.dry_run_result import dry_run_of_attributed_trace
from memfit.analysis.event_locations import script_location_at, step_end_events, training_step_of_event
from memfit.analysis.fragmentation import classify_unrequested_bytes
from memfit.analysis.peak_outside_failed_attempts import peak_event_outside_failed_attempts
from memfit.records import (
    Action,
    Attribution,
    Category,
    Explanation,
    HighMemoryMoment,
    Phase,
    PhaseMemoryChange,
    Timeline,
    Trace,
)

MOST = 3
"""Secondary peaks that are reported."""
APART = 0.05
"""Share of the peak by which memory falls between two separate peaks."""
NEAR = 0.75
"""Share of the peak that a secondary peak reaches at least."""
_PHASES = tuple(Phase)


def explain_trace(trace: Trace, at: str = "peak", *, fragments: bool = False) -> Explanation:
    """Explain a trace.

    Args:
        trace: what was recorded.
        at: ``peak``, a phase (``backward``), or a training step (``2``): the moment in it that holds most.
        fragments: also classify the reserved bytes that were not requested.

    Raises:
        UsageError: the run has no such moment.
        FileFormatError: the history contradicts itself.
    """
    line = memory_timeline(trace)
    attribution = attribute_allocations(trace, line)
    found = dry_run_of_attributed_trace(trace, line, attribution)
    return Explanation(
        summary=found,
        below_peak=secondary_peaks(trace, line),
        at=at,
        held=breakdown_at(trace, line, attribution, peak_event(trace, line, at)),
        ledger=memory_changes_by_phase(trace, line, attribution),
        fragmentation=classify_unrequested_bytes(trace) if fragments else None,
    )


def secondary_peaks(trace: Trace, line: Timeline) -> tuple[HighMemoryMoment, ...]:
    r"""Return the moments that limit a run next, once its peak is lowered; the highest first.

        allocated     /\  peak
                     /  \       /\  secondary: separated by a dip, and not far below
                 /\_/    \     /  \
                /         \___/    \
                not separated

    Args:
        trace: what was recorded.
        line: its timeline.
    """
    if not len(line.allocated):
        return ()
    peak = peak_event_outside_failed_attempts(trace, line)
    ends = step_end_events(trace)
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
    return tuple(
        HighMemoryMoment(event, script_location_at(trace, event), int(line.allocated[event]))
        for event in found
    )


def memory_changes_by_phase(
    trace: Trace, line: Timeline, attribution: Attribution, steps: int = 2
) -> tuple[PhaseMemoryChange, ...]:
    """Return what each stretch of a phase changed, up to the end of ``steps`` training steps.

        setup       parameters +4,194,304   inputs +4,096
        forward     outputs +4,096
        loss        outputs +512
        backward    gradients +4,194,304
        optimizer   optimizer state +8,388,608                  at its peak 8,388,608 more

    Consecutive calls of modules are one forward; recomputations are part of their backward.
    """
    ends = step_end_events(trace)
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
    levels = allocated_by_category_and_event(attribution, len(trace.events))
    changes = []
    for begin, stop in zip(begins, stops, strict=True):
        before = levels[:, begin - 1] if begin else np.zeros(len(Category), np.int64)
        more = levels[:, stop - 1] - before
        after = int(line.allocated[stop - 1])
        was = int(line.allocated[begin - 1]) if begin else 0
        found = _PHASES[phase[begin]]
        changes.append(
            PhaseMemoryChange(
                step=training_step_of_event(trace, begin, found),
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


def allocated_by_category_and_event(attribution: Attribution, events: int) -> npt.NDArray[np.int64]:
    """Return the bytes of allocated blocks: one row per ``Category``, one column per event."""
    levels = np.zeros((len(Category), events + 1), np.int64)
    np.add.at(levels, (attribution.category, attribution.born), attribution.block)
    np.subtract.at(levels, (attribution.category, attribution.freed), attribution.block)
    return np.cumsum(levels[:, :events], axis=1)
