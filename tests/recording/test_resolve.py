"""What is settled after a run, on histories small enough to work out by hand."""

from array import array

import numpy as np

from memfit.ghost.ffi import WorkspaceUse
from memfit.recording.labels import LabelBook
from memfit.recording.owners import Held, Holdings
from memfit.recording.phases import begin_forwards, complete
from memfit.recording.resolve import labelled, mark_spaces
from memfit.records import Action, Category, MarkKind, Phase, TensorInfo
from support.traces import BASE, Event, events_of, freed


def made(place, category=Category.UNKNOWN, label=-1):
    return Event(Action.ALLOC, BASE + 512 * place, 512, label=label, category=category)


def gone(place, label=-1):
    return freed(BASE + 512 * place, 512, label=label)[0]


def book_of(*phases):
    book = LabelBook()
    for phase in phases:
        book.use(book.intern(phase))
    return book


def saved(serial, category, place, earlier, op=0):
    return Held(serial, category, array("q", (BASE + 512 * place, 0, op, earlier)))


def settled(*held, serials=(1, 2, 3)):
    """Settle three allocations: one before a backward, one in it, and one after it."""
    book = book_of(Phase.FORWARD, Phase.BACKWARD, Phase.FORWARD, Phase.LOSS)
    book.marks.append((2, MarkKind.BACKWARD, 0))
    holdings = Holdings({TensorInfo("", "x", "", ()): 0}, {"": 0, "Exp": 1}, list(held))
    history = events_of([made(0), made(1), made(2)])
    return labelled(history, np.array(serials, np.int32), book, holdings), book


def test_what_was_there_before_the_backward_before_is_no_activation_of_a_graph():
    for category in (Category.ACTIVATION, Category.INPUT):
        events, _ = settled(*(saved(4, category, place, 1) for place in range(3)))
        assert events.category.tolist() == [0, category, category]
        assert events.tensor.tolist() == [-1, 0, 0]


def test_a_node_whose_number_is_another_threads_is_taken_at_its_word():
    events, _ = settled(*(saved(4, Category.ACTIVATION, place, 0) for place in range(3)))
    assert events.category.tolist() == [Category.ACTIVATION] * 3


def test_what_computed_an_allocation_is_kept_with_where_that_was():
    events, book = settled(saved(4, Category.ACTIVATION, 2, 0, op=1), serials=(1, 2, -1))
    label = book.labels[events.label[2]]
    assert (label.phase, label.op) == (Phase.BACKWARD, "Exp")  # of the event before, not of the last label
    events, book = settled(saved(4, Category.ACTIVATION, 2, 0, op=1), serials=(-1, -1, -1))
    assert events.label.tolist() == [-1, -1, -1]
    assert events.category[2] == Category.ACTIVATION


def test_who_saved_what_was_given_to_it_did_not_make_it():
    book = book_of(Phase.INPUT, Phase.FORWARD, Phase.LOSS)
    held = [saved(3, Category.INPUT, place, 0, op=1) for place in (0, 1)]
    holdings = Holdings({TensorInfo("", "x", "", ()): 0}, {"": 0, "Exp": 1}, held)
    events = labelled(events_of([made(0), made(1)]), np.array([1, 2], np.int32), book, holdings)
    assert [book.labels[label].op for label in events.label] == ["", "Exp"]  # a mask is its own


def test_an_event_without_a_label_has_the_phase_of_the_one_before():
    book = LabelBook()
    inside = book.intern(Phase.FORWARD, "fc", "Addmm")
    found = complete(np.array([-1, inside, -1, -1, 0, -1], np.int32), book)
    assert found[0] == -1
    assert [book.labels[label].phase for label in found[1:]] == [*[Phase.FORWARD] * 3, *[Phase.SETUP] * 2]
    assert [book.labels[label].module for label in found[1:4]] == ["fc", "", ""]
    assert not len(complete(np.zeros(0, np.int32), book))


def phases_of(*history):
    book = book_of()
    table = [book.intern(phase) for phase in (Phase.SETUP, Phase.INPUT, Phase.FORWARD, Phase.OPTIMIZER)]
    rows = [event._replace(label=table[event.label] if event.label >= 0 else -1) for event in history]
    return [
        book.labels[label].phase.value if label >= 0 else ""
        for label in begin_forwards(events_of(rows), book).label
    ]


def test_a_forward_without_a_module_begins_with_what_the_first_result_was_computed_from():
    batch, result = made(0, Category.INPUT, 1), made(3, Category.ACTIVATION, 1)
    stretch = made(1, label=1), gone(1, 1), batch, made(2, label=1), result, gone(2, 1)
    assert phases_of(*stretch) == ["input"] * 3 + ["forward"] * 3
    product, space = made(2, label=1), made(5, Category.WORKSPACE, 1)
    assert phases_of(product, space, result, gone(2, 1)) == ["forward"] * 4
    # The product outlives the stretch: nothing says that the result is of it.
    assert phases_of(*stretch[:-1]) == ["input"] * 4 + ["forward"]
    # What is gone by then was of the batch.
    assert phases_of(batch, made(2, label=1), gone(2, 1), result) == ["input"] * 3 + ["forward"]
    assert phases_of(made(2, label=1), batch, result, gone(2, 1)) == ["input"] * 2 + ["forward"] * 2


def test_what_a_backward_starts_from_was_computed_in_a_forward():
    assert phases_of(made(0, Category.INPUT, 1), made(1, Category.OUTPUT, 1)) == ["input", "forward"]


def test_only_what_is_before_a_forward_can_be_one():
    result = Category.ACTIVATION
    history = made(0, result, 2), made(1, result, 3), made(2, label=1), made(3, result), made(4, result, 0)
    assert phases_of(*history) == ["forward", "optimizer", "input", "", "forward"]


def test_what_a_graph_saved_of_a_librarys_memory_is_an_activation():
    events = events_of([made(0), made(1, Category.ACTIVATION), made(2)])
    spaces = [WorkspaceUse(BASE + 512 * place, 512, 7) for place in (0, 1, 9)]
    missed, kept = mark_spaces(events, np.full(3, 7, np.int32), spaces)
    assert (missed, kept.tolist()) == (1, [1])
    assert events.category.tolist() == [Category.WORKSPACE, Category.ACTIVATION, Category.UNKNOWN]
