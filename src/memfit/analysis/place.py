"""Where the script was at an event, in the user's terms, and how sure a figure about it is."""

from collections.abc import Iterable

from memfit.records import Label, MarkKind, Note, Phase, Place, Provenance, Trace, worst

_NOWHERE = Label(Phase.SETUP, "", "", -1)


def place_at(trace: Trace, event: int) -> Place:
    """Say where the script was at an event."""
    step = sum(mark.kind is MarkKind.TRAINING_STEP and mark.position <= event for mark in trace.marks)
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
