"""Where the script was at an event: step, phase, module, op and line."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from memfit.records import (
    Action,
    EventLabel,
    Frame,
    MarkKind,
    Note,
    Phase,
    Provenance,
    ScriptLocation,
    Trace,
    worst_provenance,
)

NOWHERE = EventLabel(Phase.SETUP, "", "", -1)
"""The label of an event without one."""
_PHASES = tuple(Phase)


def script_location_at(trace: Trace, event: int) -> ScriptLocation:
    """Return where the script was at an event; for older allocations, where the history begins."""
    recorded = np.flatnonzero(trace.events.action[event:] != Action.EARLIER)
    event += int(recorded[0]) if len(recorded) else 0
    if not len(trace.events):
        return ScriptLocation(0, Phase.SETUP, "", "", "")
    label, frame = _label(trace, event), _frame(trace, event)
    return ScriptLocation(
        step=training_step_of_event(trace, event, label.phase),
        phase=label.phase,
        module=label.module,
        op=label.op,
        line=script_line_of_event(trace, event),
        function=frame.function if frame is not None and frame.function != "<module>" else "",
    )


def phase_of_events(trace: Trace) -> npt.NDArray[np.uint8]:
    """Return each event's phase, as an index into ``tuple(Phase)``; the same as in ``script_location_at``."""
    index = np.array([_PHASES.index(label.phase) for label in (*trace.labels, NOWHERE)], np.uint8)
    return index[trace.events.label]


def step_end_events(trace: Trace) -> list[int]:
    """Return the indices of the events before which training steps ended."""
    return [mark.position for mark in trace.marks if mark.kind is MarkKind.TRAINING_STEP]


def training_step_of_event(trace: Trace, event: int, phase: Phase) -> int:
    """Return the training step of an event in a phase, from 1; 0 for the setup before the first."""
    return int(training_steps_of_events(trace, np.array([event]), np.array([_PHASES.index(phase)]))[0])


def training_steps_of_events(
    trace: Trace, events: npt.NDArray[np.int64], phase: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Return each event's training step, as ``training_step_of_event`` does, given ``phase_of_events``."""
    ended = steps_completed_at_events(trace, events)
    return np.where((ended == 0) & (phase == _PHASES.index(Phase.SETUP)), 0, ended + 1)


def steps_completed_before(trace: Trace, event: int) -> int:
    """Return the number of training steps completed before an event, including those before the history."""
    return int(steps_completed_at_events(trace, np.array([event]))[0])


def steps_completed_at_events(trace: Trace, events: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the number of completed training steps for each event, as ``steps_completed_before`` does."""
    marks = [mark for mark in trace.marks if mark.kind is MarkKind.TRAINING_STEP]
    completed = np.array([0, *(mark.index + 1 for mark in marks)])
    return completed[np.searchsorted(step_end_events(trace), events, side="right")]


def script_line_of_event(trace: Trace, event: int) -> str:
    """Return ``file:line`` of the innermost frame that is the user's own, or else of the innermost.

    In the backward, where Python has no frame, the forward's.
    """
    frame = _frame(trace, event)
    return f"{frame.file}:{frame.line}" if frame is not None else ""


def _frame(trace: Trace, event: int) -> Frame | None:
    stack = stack_index_of_event(trace, event)
    frames = [trace.frames[index] for index in trace.stacks[stack]] if stack >= 0 else []
    return next((frame for frame in frames if frame.user), frames[0] if frames else None)


def stack_index_of_event(trace: Trace, event: int) -> int:
    """Return the index of an event's stack, in the backward that of the forward; -1 without a frame."""
    stack = int(trace.events.stack[event])
    return stack if stack >= 0 else _label(trace, event).stack


def _label(trace: Trace, event: int) -> EventLabel:
    index = int(trace.events.label[event])
    return trace.labels[index] if index >= 0 else NOWHERE


def worst_provenance_of_notes(unsure: Iterable[Note]) -> Provenance:
    """Return the provenance of a figure that depends on sizes with these notes: the least certain one."""
    return worst_provenance(Provenance.EXACT, *(note.provenance for note in unsure))
