"""Annotating events after a run, on histories small enough to check by hand."""

import dataclasses
from array import array

import numpy as np
import pytest

from memfit.ghost.runtime_bindings import WorkspaceUse
from memfit.recording.annotate_events import (
    assign_labels_and_owners,
    fill_missing_event_labels,
    infer_forward_labels,
    mark_failed_workspace_allocations,
    mark_workspace_allocations,
)
from memfit.recording.event_labels import LabelBook
from memfit.recording.memory_owners import NO_TENSOR, MemoryOwners, OwnerSnapshot
from memfit.records import Action, Category, MarkKind, Phase, TensorInfo
from support.traces import BASE, Event, events_of, freed


def alloc(slot, category=Category.UNKNOWN, label=-1):
    return Event(Action.ALLOC, BASE + 512 * slot, 512, label=label, category=category)


def free(slot, label=-1):
    return freed(BASE + 512 * slot, 512, label=label)[0]


def book_of(*phases):
    book = LabelBook()
    for phase in phases:
        book.use(book.intern(phase))
    return book


def saved(serial, category, slot, earlier_backwards, op=0):
    return OwnerSnapshot(serial, category, array("q", (BASE + 512 * slot, 0, op, earlier_backwards)))


def annotate(*snapshots, serials=(1, 2, 3)):
    """Annotate three allocations: before, in and after a backward."""
    book = book_of(Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.LOSS)
    book.marks.append((2, MarkKind.BACKWARD, 0))
    owners = MemoryOwners({TensorInfo("", "x", "", ()): 0}, {"": 0, "Exp": 1}, list(snapshots))
    history = events_of([alloc(0), alloc(1), alloc(2)])
    return assign_labels_and_owners(history, np.array(serials, np.int32), book, owners), book


def test_an_allocation_before_the_previous_backward_is_not_an_activation():
    for category in (Category.ACTIVATION, Category.INPUT):
        events, _ = annotate(*(saved(4, category, slot, 1) for slot in range(3)))
        assert events.category.tolist() == [0, category, category]
        assert events.tensor.tolist() == [-1, 0, 0]


def test_a_sequence_number_that_is_too_low_excludes_no_allocation():
    events, _ = annotate(*(saved(4, Category.ACTIVATION, slot, 0) for slot in range(3)))
    assert events.category.tolist() == [Category.ACTIVATION] * 3


def test_the_op_of_a_saved_tensor_is_added_to_the_label_of_its_allocation():
    events, book = annotate(saved(4, Category.ACTIVATION, 2, 0, op=1), serials=(1, 2, -1))
    label = book.labels[events.label[2]]
    # The phase is that of the preceding event, not of the last event.
    assert (label.phase, label.op) == (Phase.BACKWARD, "Exp")
    events, book = annotate(saved(4, Category.ACTIVATION, 2, 0, op=1), serials=(-1, -1, -1))
    assert events.label.tolist() == [-1, -1, -1]
    assert events.category[2] == Category.ACTIVATION


def test_an_input_does_not_get_the_op_that_saved_it():
    book = book_of(Phase.INPUT, Phase.FORWARD, Phase.LOSS)
    snapshots = [saved(3, Category.INPUT, slot, 0, op=1) for slot in (0, 1)]
    owners = MemoryOwners({TensorInfo("", "x", "", ()): 0}, {"": 0, "Exp": 1}, snapshots)
    events = assign_labels_and_owners(
        events_of([alloc(0), alloc(1)]), np.array([1, 2], np.int32), book, owners
    )
    assert [book.labels[label].op for label in events.label] == ["", "Exp"]  # a mask does


def test_an_argument_of_a_model_is_an_input_unless_a_module_computed_it():
    given = OwnerSnapshot(4, Category.INPUT, array("q", (BASE, NO_TENSOR, 0, 0, BASE + 512, NO_TENSOR, 0, 0)))
    book = book_of(Phase.INPUT, Phase.FORWARD, Phase.FORWARD)
    owners = MemoryOwners({TensorInfo("", "x", "", ()): 0}, {"": 0}, [given])
    events = assign_labels_and_owners(
        events_of([alloc(0), alloc(1)]), np.array([1, 2], np.int32), book, owners
    )
    assert events.category.tolist() == [Category.INPUT, Category.UNKNOWN]
    assert events.tensor.tolist() == [-1, -1]  # a graph that saves it may name it


@pytest.mark.parametrize("kept", [Category.INPUT, Category.GRADIENT])
def test_a_batch_or_gradient_in_the_shape_of_a_parameter_is_no_copy_of_it(kept):
    batch, parameter = saved(3, kept, 0, 0), saved(3, Category.PARAMETER, 1, 0)
    events, _ = annotate(batch, parameter, *(saved(4, Category.COPY, slot, 0) for slot in range(3)))
    assert events.category.tolist() == [kept, Category.COPY, Category.COPY]


def test_an_event_without_a_label_gets_the_phase_of_the_event_before():
    book = LabelBook()
    inside = book.intern(Phase.FORWARD, "fc", "Addmm")
    found = fill_missing_event_labels(np.array([-1, inside, -1, -1, 0, -1], np.int32), book)
    assert found[0] == -1
    assert [book.labels[label].phase for label in found[1:]] == [*[Phase.FORWARD] * 3, *[Phase.SETUP] * 2]
    assert [book.labels[label].module for label in found[1:4]] == ["fc", "", ""]
    assert not len(fill_missing_event_labels(np.zeros(0, np.int32), book))


def phases_of(*history):
    book = book_of()
    table = [book.intern(phase) for phase in (Phase.SETUP, Phase.INPUT, Phase.FORWARD, Phase.OPTIMIZER)]
    rows = [event._replace(label=table[event.label] if event.label >= 0 else -1) for event in history]
    return [
        book.labels[label].phase.value if label >= 0 else ""
        for label in infer_forward_labels(events_of(rows), book).label
    ]


def test_a_forward_without_modules_begins_with_the_operands_of_its_first_result():
    batch, result = alloc(0, Category.INPUT, 1), alloc(3, Category.ACTIVATION, 1)
    history = (
        alloc(1, label=1),
        free(1, 1),
        batch,
        alloc(2, label=1),
        result,
        free(2, 1),
    )
    assert phases_of(*history) == ["input"] * 3 + ["forward"] * 3
    product, space = alloc(2, label=1), alloc(5, Category.WORKSPACE, 1)
    assert phases_of(product, space, result, free(2, 1)) == ["forward"] * 4
    # The product is not freed within the phase: it may not be an operand of the result.
    assert phases_of(*history[:-1]) == ["input"] * 4 + ["forward"]
    # A temporary freed before the result belongs to the preparation of the batch.
    assert phases_of(batch, alloc(2, label=1), free(2, 1), result) == ["input"] * 3 + ["forward"]
    assert phases_of(alloc(2, label=1), batch, result, free(2, 1)) == ["input"] * 2 + ["forward"] * 2


def test_the_root_of_a_backward_was_computed_in_a_forward():
    assert phases_of(alloc(0, Category.INPUT, 1), alloc(1, Category.OUTPUT, 1)) == [
        "input",
        "forward",
    ]


def test_only_events_in_phases_before_a_forward_are_relabelled():
    result = Category.ACTIVATION
    history = (
        alloc(0, result, 2),
        alloc(1, result, 3),
        alloc(2, label=1),
        alloc(3, result),
        alloc(4, result, 0),
    )
    assert phases_of(*history) == ["forward", "optimizer", "input", "", "forward"]


def test_a_library_workspace_that_a_graph_saved_is_an_activation():
    events = events_of([alloc(0), alloc(1, Category.ACTIVATION), alloc(2)])
    workspaces = [WorkspaceUse(BASE + 512 * slot, 512, 7) for slot in (0, 1, 9)]
    missed, kept = mark_workspace_allocations(events, np.full(3, 7, np.int32), workspaces, set())
    assert (missed, kept.tolist()) == (1, [1])
    assert events.category.tolist() == [Category.WORKSPACE, Category.ACTIVATION, Category.UNKNOWN]


def workspaces_among(*sizes, used, reported=()):
    """Return the categories of allocations at one address, in which a library has used some bytes."""
    events = events_of([Event(Action.ALLOC, BASE, size) for size in sizes])
    uses = [WorkspaceUse(BASE, size, 7) for size in used]
    missed, _ = mark_workspace_allocations(events, np.full(len(sizes), 7, np.int32), uses, set(reported))
    return missed, [Category(category) for category in events.category]


def test_the_memory_in_which_engines_are_timed_is_a_workspace_whichever_of_them_runs():
    expected = 0, [Category.WORKSPACE, Category.WORKSPACE, Category.UNKNOWN]
    assert workspaces_among(4096, 1024, 512, used=[1024, 4096, 2048, 1024]) == expected


def test_the_memory_in_which_engines_are_timed_may_be_larger_than_any_of_them_needs():
    # The largest engine did not fit, so PyTorch halved the allocation and left that engine out.
    expected = 0, [Category.UNKNOWN, Category.WORKSPACE, Category.WORKSPACE]
    assert workspaces_among(8192, 4096, 1024, used=[1024, 3072]) == expected


def test_the_memory_in_which_engines_are_timed_is_a_workspace_if_the_largest_of_them_is_never_timed():
    # PyTorch times ten engines in what the largest of all asks for, and then allocates for the fastest.
    expected = 0, [Category.WORKSPACE, Category.WORKSPACE, Category.UNKNOWN]
    assert workspaces_among(4096, 1024, 2048, used=[512, 1024], reported=[512, 1024, 4096]) == expected


def test_a_smaller_allocation_than_a_library_used_is_no_workspace():
    assert workspaces_among(512, used=[1024]) == (1, [Category.UNKNOWN])


def failures_among(*events, reported, ran_without=()):
    """Return the categories of the failures among ``events``, which are (action, size, serial)."""
    found = events_of([Event(action, BASE, size) for action, size, _ in events])
    serials = np.array([serial for *_, serial in events], np.int32)
    mark_failed_workspace_allocations(found, serials, set(reported), set(ran_without))
    return [Category(kind) for kind in found.category[found.action == Action.OOM]]


def test_a_workspace_that_failed_is_one_if_pytorch_went_on_to_another():
    failed, then = (Action.OOM, 4096, 7), (Action.ALLOC, 1024, 7)
    assert failures_among(failed, then, reported=[4000]) == [Category.WORKSPACE]
    halved = (Action.OOM, 1536, 7)  # half of 3,000, rounded up
    assert failures_among(failed, halved, then, reported=[4000, 3000]) == [Category.WORKSPACE] * 2
    assert failures_among(failed, reported=[4000], ran_without=[7]) == [Category.WORKSPACE]
    assert failures_among(failed, reported=[4000], ran_without=[8]) == [Category.UNKNOWN]


@pytest.mark.parametrize(
    ("events", "reported"),
    [
        ([(Action.OOM, 4096, 7)], [4096]),  # the operator failed
        ([(Action.OOM, 4096, 7), (Action.ALLOC, 1024, 8)], [4096]),  # another one ran, or another thread
        ([(Action.OOM, 4096, 7), (Action.ALLOC, 1024, 7)], [3000]),  # a tensor: the script tries again itself
        ([(Action.ALLOC, 1024, 7), (Action.OOM, 4096, 7)], [4096]),
        ([(Action.OOM, 4096, 7), (Action.ALLOC, 1024, 7)], []),
        ([(Action.OOM, 4096, -1), (Action.ALLOC, 1024, -1)], [4096]),
    ],
)
def test_a_failure_that_no_other_attempt_follows_is_none_of_a_workspace(events, reported):
    assert failures_among(*events, reported=reported) == [Category.UNKNOWN]


def test_a_gradient_as_large_as_a_workspace_at_its_address_is_a_gradient():
    events = events_of([alloc(0), alloc(0, Category.GRADIENT)])
    events = dataclasses.replace(events, tensor=np.array([-1, 3], np.int32))
    assert (
        mark_workspace_allocations(events, np.full(2, 7, np.int32), [WorkspaceUse(BASE, 512, 7)], set())[0]
        == 0
    )
    assert events.category.tolist() == [Category.WORKSPACE, Category.GRADIENT]
