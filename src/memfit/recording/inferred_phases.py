"""Infer phases where no hook has set one: on the script's own threads, and in models without modules.

thread without a label      the phase of the event before, on any thread
model without modules       setup input │ forward ...     the forward begins at the first result of a graph,
                                        │                 or at the temporaries it was computed from
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memfit.recording.event_labels import LabelBook
from memfit.records import Action, Category, EventLabel, Events, Phase

_BEFORE_FORWARD = (Phase.SETUP, Phase.INPUT, Phase.BETWEEN)
_RESULTS = (Category.ACTIVATION, Category.OUTPUT)
_EXISTED_BEFORE = {Category.PARAMETER, Category.BUFFER, Category.INPUT}


def fill_missing_labels(label: npt.NDArray[np.int32], book: LabelBook) -> npt.NDArray[np.int32]:
    """Give each event without a label the phase of the event before, if there is one.

    Args:
        label: column of ``n`` indices into the labels of the book; -1 for none.
        book: holds the labels.

    Returns:
        The completed column.
    """
    if not len(label):
        return label
    latest = np.maximum.accumulate(np.where(label >= 0, np.arange(len(label)), -1))
    before = np.where(latest >= 0, label[latest], -1)
    phase_only = [book.intern(each.phase) for each in list(book.labels)]
    return np.where(label >= 0, label, np.array([*phase_only, -1], np.int32)[before])


def infer_forwards(events: Events, book: LabelBook) -> Events:
    """Return the events with computation outside modules labelled as part of the forward.

    Args:
        events: with labels and categories.
        book: holds the labels.
    """
    early = np.array([each.phase in _BEFORE_FORWARD for each in book.labels] + [False])[events.label]
    edges = np.flatnonzero(np.diff(np.concatenate(((False,), early, (False,))).astype(np.int8)))
    results = np.flatnonzero(early & np.isin(events.category, _RESULTS))
    label = events.label.copy()
    for begin, end in edges.reshape(-1, 2).tolist():
        inside = results[np.searchsorted(results, begin) : np.searchsorted(results, end)]
        if len(inside):
            first = _first_operand(events, begin, int(inside[0]), end)
            old, inverse = np.unique(label[first:end], return_inverse=True)
            forward = [book.add(_forward(book.labels[index])) for index in old.tolist()]
            label[first:end] = np.array(forward, np.int32)[inverse]
    return replace(events, label=label)


def _forward(label: EventLabel) -> EventLabel:
    return replace(label, phase=Phase.FORWARD)


def _first_operand(events: Events, begin: int, result: int, end: int) -> int:
    """Return the first allocation that a result may have been computed from: temporary, and freed by the end.

    Args:
        events: with categories.
        begin: begin of the range in which no module runs.
        result: position of the first result of a graph in it.
        end: end of the range.
    """
    candidates: dict[int, int] = {}
    addresses, actions = events.address[begin:end].tolist(), events.action[begin:end].tolist()
    first = result
    for position, (action, address) in enumerate(zip(actions, addresses, strict=True), begin):
        if action == Action.ALLOC and position < result:
            if events.category[position] in _EXISTED_BEFORE:
                candidates.clear()
            elif events.category[position] == Category.UNKNOWN:
                candidates[address] = position
        elif action == Action.FREE_REQUESTED:
            allocated = candidates.pop(address, end)
            if position > result:
                first = min(first, allocated)
    return first
