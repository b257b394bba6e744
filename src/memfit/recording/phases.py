"""What the script was doing, where no hook said it: on threads of its own, and where no module runs.

thread without a label     the phase is that of the event before, whichever thread that was on
model of functions alone   setup input │ forward ...     from the first result of a graph on, with
                                       │                 what that was computed from
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memfit.recording.labels import LabelBook
from memfit.records import Action, Category, Events, Label, Phase

_BEFORE_FORWARD = (Phase.SETUP, Phase.INPUT, Phase.BETWEEN)
_COMPUTED = (Category.ACTIVATION, Category.OUTPUT)
_THERE_BEFORE = {Category.PARAMETER, Category.BUFFER, Category.INPUT}


def complete(label: npt.NDArray[np.int32], book: LabelBook) -> npt.NDArray[np.int32]:
    """Give events without a label one of the phase of the event before; without one before, they stay so.

    Args:
        label: of ``n`` events, as an index into the book's labels; -1 where there is none.
        book: where labels are kept.

    Returns:
        The same, completed.
    """
    if not len(label):
        return label
    latest = np.maximum.accumulate(np.where(label >= 0, np.arange(len(label)), -1))
    before = np.where(latest >= 0, label[latest], -1)
    phase_alone = [book.intern(one.phase) for one in list(book.labels)]
    return np.where(label >= 0, label, np.array([*phase_alone, -1], np.int32)[before])


def begin_forwards(events: Events, book: LabelBook) -> Events:
    """Say of what is computed before any module runs that it is the forward.

    Args:
        events: with labels and categories.
        book: where labels are kept.
    """
    early = np.array([one.phase in _BEFORE_FORWARD for one in book.labels] + [False])[events.label]
    edges = np.flatnonzero(np.diff(np.concatenate(((False,), early, (False,))).astype(np.int8)))
    results = np.flatnonzero(early & np.isin(events.category, _COMPUTED))
    label = events.label.copy()
    for begin, end in edges.reshape(-1, 2).tolist():
        inside = results[np.searchsorted(results, begin) : np.searchsorted(results, end)]
        if len(inside):
            first = _computed_from(events, begin, int(inside[0]), end)
            stretch, inverse = np.unique(label[first:end], return_inverse=True)
            forward = [book.add(_forward(book.labels[one])) for one in stretch.tolist()]
            label[first:end] = np.array(forward, np.int32)[inverse]
    return replace(events, label=label)


def _forward(label: Label) -> Label:
    return replace(label, phase=Phase.FORWARD)


def _computed_from(events: Events, begin: int, result: int, end: int) -> int:
    """Return the first allocation that a result may have been computed from: unsaved, and gone by the end.

    Args:
        events: with categories.
        begin: of the stretch.
        result: the first in it that is of a graph.
        end: of the stretch.
    """
    waiting: dict[int, int] = {}
    addresses, actions = events.address[begin:end].tolist(), events.action[begin:end].tolist()
    first = result
    for position, (action, address) in enumerate(zip(actions, addresses, strict=True), begin):
        if action == Action.ALLOC and position < result:
            if events.category[position] in _THERE_BEFORE:
                waiting.clear()
            elif events.category[position] == Category.UNKNOWN:
                waiting[address] = position
        elif action == Action.FREE_REQUESTED:
            made = waiting.pop(address, end)
            if position > result:
                first = min(first, made)
    return first
