"""When the script is over: which event a serial, an address, a moment stood for.

serials ──> labels and marks at their events
addresses that objects and graphs held ──> category, tensor and op of the allocation that was there then
addresses that libraries worked in ──> workspaces
PyTorch's own functions ──> ops, and what is communication
"""

from bisect import bisect_right
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memfit.ghost.ffi import WorkspaceUse
from memfit.recording.labels import LabelBook
from memfit.recording.owners import Holdings
from memfit.recording.phases import complete
from memfit.recording.torch_calls import Call
from memfit.records import Action, Category, Events, Label, Mark, MarkKind, Phase

_OF_GRAPHS = {Category.ACTIVATION, Category.INPUT}
_RATHER_OTHERS = {*_OF_GRAPHS, Category.OUTPUT, Category.UNKNOWN}
_COMPUTE = {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.RECOMPUTE}


def positions(serials: npt.NDArray[np.int32], wanted: list[int]) -> list[int]:
    """Return, for each serial, the first event that carries it or a later one."""
    latest = np.maximum.accumulate(serials) if len(serials) else serials
    return [int(position) for position in np.searchsorted(latest, wanted)]


def placed(marks: list[tuple[int, MarkKind, int]], serials: npt.NDArray[np.int32]) -> tuple[Mark, ...]:
    """Return marks at their places between events."""
    places = positions(serials, [serial for serial, _, _ in marks])
    return tuple(Mark(at, kind, index) for at, (_, kind, index) in zip(places, marks, strict=True))


def labelled(events: Events, serials: npt.NDArray[np.int32], book: LabelBook, holdings: Holdings) -> Events:
    """Put labels, categories and tensors on the events.

    What a graph saved, or anybody has, may be something else, too: a parameter is one, and no activation.
    """
    label_of = np.array([*book.serials, -1], dtype=np.int32)
    dated = (serials >= 0) & (serials < len(book.serials))
    label = complete(label_of[np.where(dated, serials, len(book.serials))], book)
    category = np.zeros(len(events), dtype=np.uint8)
    tensor = np.full(len(events), -1, dtype=np.int32)
    live: dict[int, int] = {}
    actions, addresses = events.action.tolist(), events.address.tolist()
    labels, ops, seen = book.labels, list(holdings.ops), 0
    backwards = positions(serials, [serial for serial, kind, _ in book.marks if kind is MarkKind.BACKWARD])
    moments = positions(serials, [held.serial for held in holdings.held])
    for at, held in zip(moments, holdings.held, strict=True):
        for position in range(seen, at):
            if actions[position] in (Action.ALLOC, Action.EARLIER):
                live[addresses[position]] = position
        seen = max(seen, at)
        for address, what, op, earlier in zip(*(held.found[place::4] for place in range(4)), strict=True):
            event = live.get(address)
            if event is None:
                continue
            if held.category in _RATHER_OTHERS and tensor[event] >= 0:
                continue
            # Threads number their nodes each for itself: of one that is made in a backward (a graph of
            # gradients) the number may be too low, and then nothing is told from it.
            if held.category in _OF_GRAPHS and dated[event] and bisect_right(backwards, event) < earlier:
                continue
            category[event], tensor[event] = held.category, what
            made = labels[label[event]] if label[event] >= 0 else None
            if op and made and (held.category is Category.ACTIVATION or made.phase in _COMPUTE):
                label[event] = book.add(replace(made, op=ops[op]))
    return replace(events, label=label, category=category, tensor=tensor)


def called(events: Events, book: LabelBook, column: npt.NDArray[np.int32], table: tuple[Call, ...]) -> Events:
    """Say of allocations what of PyTorch made them, where nothing better is known.

    Autograd's nodes are better known, unless Python runs in them that communicates.

    Args:
        events: with labels and categories.
        book: where labels are kept.
        column: what of PyTorch each event happened in, as an index into ``table``.
        table: of those.
    """
    category, label, labels = events.category.copy(), events.label.copy(), book.labels
    made = (events.action == Action.ALLOC) & (label >= 0)
    communicates = np.array([call.communicates for call in table])[column]
    category[made & communicates & (category == Category.UNKNOWN)] = Category.COMMUNICATION
    known = np.flatnonzero(made & (column > 0))
    pairs, inverse = np.unique(np.stack((label[known], column[known])), axis=1, return_inverse=True)
    better = [with_op(labels[one], table[call]) for one, call in pairs.T.tolist()]
    label[known] = np.array([book.add(one) for one in better], np.int32)[inverse.reshape(-1)]
    return replace(events, label=label, category=category)


def with_op(label: Label, call: Call) -> Label:
    """Return a label with the op that is better known: its own, or what of PyTorch was called."""
    if call.how and label.phase is Phase.OPTIMIZER:
        return replace(label, op=f"{label.op} ({call.how})")
    # An optimizer's functions under a node of the backward are a step that is fused into it.
    return replace(label, op=call.name) if call.communicates or call.how or not label.op else label


def mark_spaces(
    events: Events, serials: npt.NDArray[np.int32], spaces: list[WorkspaceUse]
) -> tuple[int, npt.NDArray[np.int64]]:
    """Mark the allocations that libraries worked in: of that address and size, under that label.

    What a graph saved of them (what a recurrent layer reserves for its backward) is an activation.

    A library is called right after its memory was allocated, on the same thread and with no hook between.
    A thread that was never stamped has no label in the history and label 0 in the ghost's log.

    Returns:
        How many were not found, and the events that made those that a graph saved.
    """
    used = {(space.address, space.size, space.label) for space in spaces}
    found, kept = set(), []
    of_their_size = np.isin(events.size, list({space.size for space in spaces}))
    for position in np.flatnonzero((events.action == Action.ALLOC) & of_their_size).tolist():
        label = max(int(serials[position]), 0)
        allocation = int(events.address[position]), int(events.size[position]), label
        if allocation in used:
            found.add(allocation)
            if events.category[position] in _OF_GRAPHS:
                kept.append(position)
            else:
                events.category[position] = Category.WORKSPACE
    return len(used - found), np.array(kept, np.int64)
