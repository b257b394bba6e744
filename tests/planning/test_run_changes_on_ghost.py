"""What the run of a plan needs and allocates, with the allocator's settings that the plan gives it."""

import pytest

from memfit.analysis.trial_result import TrialResult
from memfit.planning.run_changes_on_ghost import (
    PlanRuns,
    replayable_run_of_trial,
    seconds_to_run_model_again,
)
from memfit.records import Action, Change, Operation, StepOperations
from support.planned_script import DEVICE
from support.traces import BASE, trace_of

MIB = 1 << 20
SIZE = 77 * MIB // 4
OUTSIDE = DEVICE.outside.bytes


def unused(_change, _what):
    raise AssertionError


@pytest.mark.parametrize(
    ("budget", "conf", "allocated"), [(640, "", 640 * MIB), (639, "expandable_segments:True", 32 * SIZE)]
)
def test_a_run_that_gets_expandable_segments_says_what_it_allocates_with_them(budget, conf, allocated):
    """PyTorch splits off 768 KiB from an expandable segment only."""
    bases = [BASE + number * (64 << 20) for number in range(32)]
    history = [
        event for at in bases for event in ((Action.SEGMENT_ALLOC, at, 20 * MIB), (Action.ALLOC, at, SIZE))
    ]
    run = replayable_run_of_trial(TrialResult(trace_of(history, device=DEVICE, versions={"torch": "2.14.1"})))
    runs = PlanRuns(unused, budget * MIB + OUTSIDE, tune=True)
    found = runs.needs([run], Change(), 1.0)
    assert (found.change.allocator, found.allocated) == (conf, allocated)


def test_a_run_needs_no_memory_for_what_pytorch_releases_where_memory_is_short():
    at, freed = BASE + (1 << 30), (Action.FREE_REQUESTED, Action.FREE_COMPLETED)
    history = [(Action.SEGMENT_ALLOC, BASE, 320 * MIB), (Action.ALLOC, BASE, 320 * MIB)]
    history += [(each, BASE, 320 * MIB) for each in freed]
    history += [(Action.SEGMENT_ALLOC, at, 640 * MIB), (Action.ALLOC, at, 640 * MIB)]
    trace = trace_of(history, device=DEVICE, versions={"torch": "2.14.1"})
    runs = PlanRuns(unused, 1 << 40, tune=False)
    found = runs.needs([replayable_run_of_trial(TrialResult(trace))], Change(), 1.0)
    assert found.needs.bytes == 640 * MIB + OUTSIDE


@pytest.mark.parametrize(("last", "seconds"), [(4, 0.0), (4000, 2.0)], ids=["loss", "outputs"])
def test_a_model_whose_loss_the_loop_divides_runs_once_in_slices(last, seconds):
    def operation(call, source, *creates):
        return Operation("op", call, source, (), creates, (), 0, 0, "float32", False, 0.0, 0)

    forward = operation(0, -1, 0), operation(0, -1, 1), operation(-1, -1, 2)
    backward = tuple(operation(-1, source, 3) for source in (2, 1, 0))
    step = StepOperations((4000, last, 4, 4000), (), forward, backward)
    assert seconds_to_run_model_again(step, lambda _: 1.0) == seconds
