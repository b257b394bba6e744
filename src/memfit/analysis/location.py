"""Where the script was at an event, in the user's terms, and how sure a figure about it is."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from memfit.records import Action, Label, MarkKind, Note, Phase, Provenance, ScriptLocation, Trace, worst

NOWHERE = Label(Phase.SETUP, "", "", -1)
"""The label of an event that nothing is known of."""
_PHASES = tuple(Phase)


def location_at(trace: Trace, event: int) -> ScriptLocation:
    """Say where the script was at an event; of what is older than the history, when that begins."""
    told = np.flatnonzero(trace.events.action[event:] != Action.EARLIER)
    event += int(told[0]) if len(told) else 0
    if not len(trace.events):
        return ScriptLocation(0, Phase.SETUP, "", "", "")
    label = _label(trace, event)
    return ScriptLocation(
        step=step_of(trace, event, label.phase),
        phase=label.phase,
        module=label.module,
        op=label.op,
        line=line_of(trace, event),
    )


def phases(trace: Trace) -> npt.NDArray[np.uint8]:
    """Return each event's phase, as an index into ``tuple(Phase)``: that which ``location_at`` says."""
    index = np.array([_PHASES.index(label.phase) for label in (*trace.labels, NOWHERE)], np.uint8)
    return index[trace.events.label]


def step_ends(trace: Trace) -> list[int]:
    """Return the places of events before which training steps ended."""
    return [mark.position for mark in trace.marks if mark.kind is MarkKind.TRAINING_STEP]


def step_of(trace: Trace, event: int, phase: Phase) -> int:
    """Return the training step that an event of a phase is in, from 1; 0 for the setup before the first."""
    return int(steps_of(trace, np.array([event]), np.array([_PHASES.index(phase)]))[0])


def steps_of(
    trace: Trace, events: npt.NDArray[np.int64], phase: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """Return the training step of each of some events, as ``step_of`` does; phases as ``phases`` has them."""
    ended = steps_at(trace, events)
    return np.where((ended == 0) & (phase == _PHASES.index(Phase.SETUP)), 0, ended + 1)


def steps_before(trace: Trace, event: int) -> int:
    """Return how many training steps were completed up to an event, those before the history, too."""
    return int(steps_at(trace, np.array([event]))[0])


def steps_at(trace: Trace, events: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many training steps were completed up to each of some events, as ``steps_before`` does."""
    marks = [mark for mark in trace.marks if mark.kind is MarkKind.TRAINING_STEP]
    completed = np.array([0, *(mark.index + 1 for mark in marks)])
    return completed[np.searchsorted(step_ends(trace), events, side="right")]


def line_of(trace: Trace, event: int) -> str:
    """Return ``file:line`` of the innermost frame that is the user's own, or else of the innermost.

    In the backward, where Python has no frame, that of the forward.
    """
    stack = int(trace.events.stack[event])
    if stack < 0:
        stack = _label(trace, event).stack
    if stack < 0:
        return ""
    frames = [trace.frames[index] for index in trace.stacks[stack]]
    frame = next((frame for frame in frames if frame.user), frames[0] if frames else None)
    return f"{frame.file}:{frame.line}" if frame is not None else ""


def _label(trace: Trace, event: int) -> Label:
    index = int(trace.events.label[event])
    return trace.labels[index] if index >= 0 else NOWHERE


def least_certain(unsure: Iterable[Note]) -> Provenance:
    """Return how sure a figure is that rests on sizes with these notes: as the least sure of them."""
    return worst(Provenance.EXACT, *(note.provenance for note in unsure))
