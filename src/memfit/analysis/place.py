"""Where the script was at an event, in the user's terms, and how sure a figure about it is."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from memfit.records import Action, Label, MarkKind, Note, Phase, Place, Provenance, Trace, worst

_NOWHERE = Label(Phase.SETUP, "", "", -1)


def place_at(trace: Trace, event: int) -> Place:
    """Say where the script was at an event; of what is older than the history, when that begins."""
    told = np.flatnonzero(trace.events.action[event:] != Action.EARLIER)
    event += int(told[0]) if len(told) else 0
    step = steps_before(trace, event)
    if not len(trace.events):
        return Place(0, Phase.SETUP, "", "", "")
    label = _label(trace, event)
    return Place(
        step=step + 1 if step or label.phase is not Phase.SETUP else 0,
        phase=label.phase,
        module=label.module,
        op=label.op,
        line=line_of(trace, event),
    )


def steps_before(trace: Trace, event: int) -> int:
    """Return how many training steps were completed up to an event, those before the history, too."""
    return int(steps_at(trace, np.array([event]))[0])


def steps_at(trace: Trace, events: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return how many training steps were completed up to each of some events, as ``steps_before`` does."""
    marks = [mark for mark in trace.marks if mark.kind is MarkKind.TRAINING_STEP]
    completed = np.array([0, *(mark.index + 1 for mark in marks)])
    return completed[np.searchsorted([mark.position for mark in marks], events, side="right")]


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
    return trace.labels[index] if index >= 0 else _NOWHERE


def how_sure(unsure: Iterable[Note]) -> Provenance:
    """Return how sure a figure is that rests on sizes with these notes: as the least sure of them."""
    return worst(Provenance.EXACT, *(note.provenance for note in unsure))
