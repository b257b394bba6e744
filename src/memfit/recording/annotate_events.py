"""After the run: put labels, categories, tensors and marks on the events of the history.

serials                                  labels and marks of the events
addresses owned by objects and graphs    category, tensor and op of the allocation there at that moment
addresses used by libraries              workspaces
sizes that cuDNN's plans report          failed workspaces, after which PyTorch tried another plan
PyTorch functions in the stacks          ops, and which of them communicate

Phases are inferred where no hook has set one: on the script's own threads, and in models without modules:

thread without a label      the phase of the event before, on any thread
model without modules       setup input │ forward ...     the forward begins at the first result of a graph,
                                        │                 or at the temporaries it was computed from
"""

from bisect import bisect_right
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memfit.ghost.runtime_bindings import WorkspaceUse
from memfit.recording.allocating_functions import TorchFunction
from memfit.recording.event_labels import LabelBook
from memfit.recording.memory_owners import NO_TENSOR, MemoryOwners
from memfit.records import Action, Category, EventLabel, Events, Mark, MarkKind, Phase

_OF_GRAPHS = {Category.ACTIVATION, Category.INPUT}
_WEAK_CLAIMS = {*_OF_GRAPHS, Category.OUTPUT, Category.UNKNOWN}
"""Categories that do not replace another owner: a parameter that a graph has saved is still a parameter."""
_ROUNDING = 512
"""PyTorch records a failed request rounded up to a multiple of this. With ``roundup_power2_divisions`` it
rounds further, and a failed workspace counts like any other failure."""
_COMPUTE = {Phase.FORWARD, Phase.LOSS, Phase.BACKWARD, Phase.RECOMPUTE}


def _event_positions(serials: npt.NDArray[np.int32], wanted: list[int]) -> list[int]:
    """Return, for each wanted serial, the position of the first event that carries it or a later one."""
    latest = np.maximum.accumulate(serials) if len(serials) else serials
    return [int(position) for position in np.searchsorted(latest, wanted)]


def place_marks_between_events(
    marks: list[tuple[int, MarkKind, int]], serials: npt.NDArray[np.int32]
) -> tuple[Mark, ...]:
    """Return marks with their positions between events."""
    positions = _event_positions(serials, [serial for serial, _, _ in marks])
    return tuple(Mark(at, kind, index) for at, (_, kind, index) in zip(positions, marks, strict=True))


def assign_labels_and_owners(
    events: Events, serials: npt.NDArray[np.int32], book: LabelBook, owners: MemoryOwners
) -> Events:
    """Return the events with labels, categories and tensors."""
    label_of = np.array([*book.serials, -1], dtype=np.int32)
    dated = (serials >= 0) & (serials < len(book.serials))
    label = fill_missing_event_labels(label_of[np.where(dated, serials, len(book.serials))], book)
    category = np.zeros(len(events), dtype=np.uint8)
    tensor = np.full(len(events), -1, dtype=np.int32)
    allocated_at: dict[int, int] = {}
    actions, addresses = events.action.tolist(), events.address.tolist()
    labels, ops, seen = book.labels, list(owners.ops), 0
    backwards = _event_positions(
        serials, [serial for serial, kind, _ in book.marks if kind is MarkKind.BACKWARD]
    )
    moments = _event_positions(serials, [snapshot.serial for snapshot in owners.snapshots])
    for moment, owned in zip(moments, owners.snapshots, strict=True):
        for position in range(seen, moment):
            if actions[position] in (Action.ALLOC, Action.EARLIER):
                allocated_at[addresses[position]] = position
        seen = max(seen, moment)
        rows = zip(*(owned.rows[column::4] for column in range(4)), strict=True)
        for address, tensor_index, op, earlier_backwards in rows:
            event = allocated_at.get(address)
            if event is None:
                continue
            if _gives_way(owned.category, category[event], tensor[event]):
                continue
            # Each thread numbers its nodes by itself: the number of a node created in a backward (a graph of
            # gradients) may be too low, and then nothing follows from it.
            if (
                owned.category in _OF_GRAPHS
                and dated[event]
                and bisect_right(backwards, event) < earlier_backwards
            ):
                continue
            origin = labels[label[event]] if label[event] >= 0 else None
            computed = origin is not None and origin.phase in _COMPUTE
            if tensor_index == NO_TENSOR and computed:
                continue  # the result of another module is no input
            category[event], tensor[event] = owned.category, tensor_index
            if op and origin and (owned.category is Category.ACTIVATION or computed):
                label[event] = book.add(replace(origin, op=ops[op]))
    return replace(events, label=label, category=category, tensor=tensor)


def _gives_way(claim: Category, category: int, tensor: int) -> bool:
    """Return whether a claim yields to the category and tensor that an allocation already has."""
    if claim is Category.COPY:
        # A batch may have the shape of a parameter, and so may a bucket's view of a gradient that is gone.
        return category not in (Category.UNKNOWN, Category.PARAMETER)
    return claim in _WEAK_CLAIMS and tensor >= 0


def assign_torch_functions(
    events: Events, book: LabelBook, column: npt.NDArray[np.int32], table: tuple[TorchFunction, ...]
) -> Events:
    """Return the events with the PyTorch function of an allocation as its op, if no better op is known.

    Autograd's nodes are better, except nodes whose Python code communicates.
    """
    category, label, labels = events.category.copy(), events.label.copy(), book.labels
    allocated = (events.action == Action.ALLOC) & (label >= 0)
    communicates = np.array([function.communicates for function in table])[column]
    gathers = np.array([function.gathers for function in table])[column]
    communicates = gathers | (communicates & (category == Category.UNKNOWN))
    category[allocated & communicates] = Category.COMMUNICATION
    known = np.flatnonzero(allocated & (column > 0))
    pairs, inverse = np.unique(np.stack((label[known], column[known])), axis=1, return_inverse=True)
    better = [label_with_better_op(labels[index], table[function]) for index, function in pairs.T.tolist()]
    label[known] = np.array([book.add(each) for each in better], np.int32)[inverse.reshape(-1)]
    return replace(events, label=label, category=category)


def label_with_better_op(label: EventLabel, function: TorchFunction) -> EventLabel:
    """Return a label with the more informative op: its own, or the PyTorch function."""
    if function.how and label.phase is Phase.OPTIMIZER:
        return replace(label, op=f"{label.op} ({function.how})")
    # An optimizer's function under a node of the backward is a step that is fused into the backward.
    is_better = function.communicates or function.how or not label.op
    return replace(label, op=function.name) if is_better else label


def mark_workspace_allocations(
    events: Events, serials: npt.NDArray[np.int32], uses: list[WorkspaceUse], reported: set[int]
) -> tuple[int, npt.NDArray[np.int64]]:
    """Mark library workspaces, in place: allocations with an address, size and label of the ghost's log.

    A workspace that a graph has saved (the reserve space of a recurrent layer) remains an activation.

    A library is called right after its memory was allocated, on the same thread and with no hook in between.
    A thread that was never stamped has no label in the history and label 0 in the ghost's log. With
    ``torch.backends.cudnn.benchmark``, PyTorch times engines with one allocation, as large as the largest of
    all needs, timed or not, or half of that as often as it takes to fit.

    Args:
        events: with their categories.
        serials: of the events.
        uses: the ghost's log.
        reported: the sizes in bytes that cuDNN's execution plans have reported.

    Returns:
        The number of workspaces that were not found, and the positions of those that a graph has saved.
    """
    used: dict[tuple[int, int], set[int]] = {}
    for use in uses:
        used.setdefault((use.address, use.label), set()).add(use.size)
    allocated: dict[tuple[int, int], list[int]] = {place: [] for place in used}
    addresses = np.array(sorted({use.address for use in uses}), np.uint64)
    at_address = (events.action == Action.ALLOC) & np.isin(events.address, addresses)
    for position in np.flatnonzero(at_address).tolist():
        place = int(events.address[position]), max(int(serials[position]), 0)
        if place in allocated:
            allocated[place].append(position)
    missed, saved = 0, []
    for place, sizes in used.items():
        there = {position: int(events.size[position]) for position in allocated[place]}
        found = _holding(sizes, reported, there)
        missed += 0 if found else len(sizes)
        for position in found:
            if events.category[position] in _OF_GRAPHS:
                saved.append(position)
            elif events.tensor is None or events.tensor[position] < 0:  # a live tensor may be as large
                events.category[position] = Category.WORKSPACE
    return missed, np.array(sorted(saved), np.int64)


def mark_failed_workspace_allocations(
    events: Events, serials: npt.NDArray[np.int32], reported: set[int], ran_without: set[int]
) -> None:
    """Mark, in place, the failed allocations of workspaces after which PyTorch tried another plan or a half.

    No hook runs in between, so the next attempt, or the plan that runs, carries the same serial.

    Args:
        events: with their categories.
        serials: of the events.
        reported: the sizes in bytes that cuDNN's execution plans have reported.
        ran_without: the serials during which a plan without a workspace ran.

    Source: ``try_plans`` and ``generate_and_filter_plans``, ``aten/src/ATen/native/cudnn/Conv_v8.cpp``,
    PyTorch 2.14.
    """
    halves = {size >> times for size in reported for times in range(size.bit_length())}
    tried = [-(-size // _ROUNDING) * _ROUNDING for size in halves]
    asked = np.flatnonzero(np.isin(events.action, (Action.ALLOC, Action.OOM)) & (serials >= 0))
    last = np.full(int(serials.max(initial=-1)) + 1, -1, np.int64)
    last[serials[asked]] = asked  # NumPy keeps the last of equal indices
    failed = asked[events.action[asked] == Action.OOM]
    goes_on = (last[serials[failed]] > failed) | np.isin(serials[failed], list(ran_without))
    carried_on = goes_on & np.isin(events.size[failed], tried)
    events.category[failed[carried_on]] = Category.WORKSPACE


def _holding(used: set[int], reported: set[int], allocated: dict[int, int]) -> list[int]:
    """Return which allocations at an address, by their position, held the workspaces of the used sizes there.

    cuDNN's plans have reported the other sizes.
    """
    larger = [position for position, size in allocated.items() if size > max(used)]
    found = [
        position
        for position, size in allocated.items()
        if size in used or (position in larger and size in reported)
    ]
    if larger and all(allocated[position] < max(used) for position in found):
        found.append(min(larger, key=lambda position: (allocated[position], position)))
    return found


_BEFORE_FORWARD = (Phase.SETUP, Phase.INPUT, Phase.BETWEEN)
_RESULTS = (Category.ACTIVATION, Category.OUTPUT)
_EXISTED_BEFORE = {Category.PARAMETER, Category.BUFFER, Category.INPUT}


def fill_missing_event_labels(label: npt.NDArray[np.int32], book: LabelBook) -> npt.NDArray[np.int32]:
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


def infer_forward_labels(events: Events, book: LabelBook) -> Events:
    """Return the events with computation outside modules labelled as part of the forward."""
    early = np.array([each.phase in _BEFORE_FORWARD for each in book.labels] + [False])[events.label]
    edges = np.flatnonzero(np.diff(np.concatenate(((False,), early, (False,))).astype(np.int8)))
    results = np.flatnonzero(early & np.isin(events.category, _RESULTS))
    label = events.label.copy()
    for begin, end in edges.reshape(-1, 2).tolist():
        inside = results[np.searchsorted(results, begin) : np.searchsorted(results, end)]
        if len(inside):
            first = _first_operand(events, begin, int(inside[0]), end)
            old, inverse = np.unique(label[first:end], return_inverse=True)
            forward = [book.add(replace(book.labels[each], phase=Phase.FORWARD)) for each in old.tolist()]
            label[first:end] = np.array(forward, np.int32)[inverse]
    return replace(events, label=label)


def _first_operand(events: Events, begin: int, result: int, end: int) -> int:
    """Return the first allocation that a result may have been computed from: temporary, and freed by the end.

    No module runs from ``begin`` to ``end``; ``result`` is the position of the first result of a graph there.
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
