"""The stages of a run, from marks written by hand."""

from dataclasses import replace

import pytest

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.explanation import explain_trace
from memfit.analysis.run_stages import memory_use_by_stage, stage_spans
from memfit.errors import UsageError
from memfit.records import Action, Category, Mark, MarkKind, Stage
from support.stage_marks import LETTERS, NAMES, ORDERS
from support.traces import BASE, freed, trace_of

SIZE = 1 << 21


def stages_of(marks):
    """Return the stage after each mark; each mark is followed by one event."""
    history = [
        (Action.SEGMENT_ALLOC, BASE, SIZE),
        *((Action.ALLOC, BASE + 512 * number, 512) for number in range(len(marks))),
    ]
    placed = [Mark(position, *LETTERS[letter]) for position, letter in enumerate(marks, 1)]
    trace = trace_of(history, marks=tuple(placed))
    letters = {stage: letter for letter, stage in NAMES.items()}
    found = [""] * len(history)
    for span in stage_spans(trace):
        found[span.begin : span.end] = letters[span.stage] * (span.end - span.begin)
    return "".join(found)[1:]


@pytest.mark.parametrize(("marks", "stages"), ORDERS)
def test_stages_follow_from_marks(marks, stages):
    assert stages_of(marks) == stages


def test_a_run_without_batches_and_evaluations_has_no_stages():
    assert not stage_spans(trace_of([], marks=(Mark(0, MarkKind.FORWARD, 0),)))


def test_a_trace_that_starts_in_the_middle_of_a_run_has_no_setup():
    history = [(Action.EARLIER, BASE, 512), (Action.ALLOC, BASE + 512, 512)]
    trace = trace_of(history, marks=tuple(Mark(1, *LETTERS[letter]) for letter in "Bfv"))
    assert [(span.begin, span.stage) for span in stage_spans(trace)] == [(1, Stage.EVALUATION)]
    assert memory_use_by_stage(trace, memory_timeline(trace_of([]))) == ()


def with_levels(*, keeps):
    """Return a trace: a batch trained on, an evaluation of two tensors, another batch trained on."""
    first, second, third = (BASE + SIZE * number for number in range(3))
    history = [
        (Action.SEGMENT_ALLOC, BASE, 4 * SIZE),
        (Action.ALLOC, first, SIZE),  # 1: training
        (Action.ALLOC, second, SIZE),  # 2: evaluation
        (Action.ALLOC, third, SIZE),
        *freed(third, SIZE),
        *([] if keeps else freed(second, SIZE)),
    ]
    last = len(history)
    history += freed(first, SIZE)
    letters = [(1, "bf"), (1, "w"), (2, "s"), (2, "Bfv"), (last, "bf"), (last, "w"), (len(history), "s")]
    marks = [Mark(position, *LETTERS[each]) for position, some in letters for each in some]
    return trace_of(history, marks=tuple(marks))


@pytest.mark.parametrize("keeps", [True, False])
def test_each_stage_has_its_own_peak_and_what_it_leaves_behind(keeps):
    trace = with_levels(keeps=keeps)
    uses = {use.stage: use for use in memory_use_by_stage(trace, memory_timeline(trace))}
    assert list(uses) == [Stage.SETUP, Stage.TRAINING, Stage.EVALUATION]
    assert (uses[Stage.TRAINING].times, uses[Stage.EVALUATION].times) == (2, 1)
    assert uses[Stage.EVALUATION].allocated == 3 * SIZE
    assert uses[Stage.TRAINING].allocated == (2 if keeps else 1) * SIZE
    assert uses[Stage.EVALUATION].leaves == (SIZE if keeps else 0)
    assert uses[Stage.TRAINING].leaves == 0
    assert not uses[Stage.EVALUATION].ran_out


def test_workspaces_are_not_left_behind():
    trace = with_levels(keeps=True)
    trace.events.category[2] = Category.WORKSPACE
    assert not any(use.leaves for use in memory_use_by_stage(trace, memory_timeline(trace)))


def test_the_moment_of_a_stage_can_be_explained():
    trace = with_levels(keeps=False)
    assert explain_trace(trace, "evaluation").held.allocated == 3 * SIZE
    assert explain_trace(trace, "training").held.allocated == SIZE
    with pytest.raises(UsageError, match="no saving: its stages are setup, training, evaluation"):
        explain_trace(trace, "saving")
    with pytest.raises(UsageError, match=r"one of peak, setup, .*evaluation, saving, or the number"):
        explain_trace(trace, "lunch")


def test_a_stage_that_allocates_nothing_has_what_it_found_and_no_place():
    trace = with_levels(keeps=True)
    end = len(trace.events)
    marks = (*trace.marks, Mark(end - 2, *LETTERS["t"]), Mark(end - 2, *LETTERS["b"]))
    trace = replace(trace, marks=tuple(sorted(marks, key=lambda mark: mark.position)))
    saving = next(
        use for use in memory_use_by_stage(trace, memory_timeline(trace)) if use.stage is Stage.SAVING
    )
    assert saving.place is None
    assert saving.allocated == 2 * SIZE
