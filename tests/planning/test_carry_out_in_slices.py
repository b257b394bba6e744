"""Which plans with micro-batches of the loop's are carried out by batch slices."""

from dataclasses import replace

import pytest

from memfit.analysis.trial_result import TrialResult
from memfit.planning.carry_out_in_slices import SlicedPlans, dimension_of_samples
from memfit.planning.run_changes_on_ghost import PlanRuns, is_made_by_loop
from memfit.records import Change, DividedBatches, LoaderBatchSize, ScriptEnd, StepInputs
from support.planned_script import MIB, OUTSIDE, needing

AGAIN = 0.3


def divided(count, time, runs, **settings):
    """Return the run of a plan that divides batches of 16."""
    size = 16 // count
    loader = LoaderBatchSize(size, "t.py:7")
    parts = DividedBatches(count, size, "", "t.py:7", loader=loader, dim=0)
    change = Change(
        {"accumulation": {"parts_per_batch": count}}, "", replace(parts, **settings), loader=loader
    )
    return runs.make(change, time + AGAIN * (count - 1) / count)[1]


def search(sizes):
    """Return runs of a script whose slices need some MiB, None where it refuses them, and those of slices."""
    seen = []

    def run(change, _what):
        settings = change.plan.get("batch_slices")
        if settings is None:
            return TrialResult(needing(loops[change.parts]), ("Net (optimizer: t:1)",))
        assert change.micro_batches is None is change.loader
        seen.append(settings)
        found = sizes[settings["count"], settings.get("kept", 1)]
        return (
            ScriptEnd("refused", 0, "it combines samples") if found is None else TrialResult(needing(found))
        )

    loops = {2: 60, 4: 40, 8: 30}
    return PlanRuns(run, 70 * MIB + OUTSIDE, tune=False), seen


def carried_out(sizes, parts=(2, 4), again=AGAIN, **settings):
    runs, seen = search(sizes)
    found = [divided(count, 1.0 + count / 100, runs, **settings) for count in parts]
    runs.again = again
    plans = SlicedPlans(runs, 70 * MIB + OUTSIDE)
    return plans.fastest(found[0], found), runs.made_by_loop(found[0]), seen


def test_slices_take_the_place_of_as_many_micro_batches():
    chosen, in_loop, seen = carried_out({(2, 1): 60})
    assert (chosen.change.plan, seen) == ({"batch_slices": {"count": 2}}, [{"count": 2}])
    assert chosen.time == pytest.approx(1.02 + AGAIN / 2)
    assert (in_loop.time, in_loop.change.parts) == (pytest.approx(1.02), 2)


def test_where_as_many_slices_do_not_fit_the_next_plan_is_tried():
    chosen, in_loop, seen = carried_out({(2, 1): 80, (4, 1): 60})
    assert chosen.change.plan["batch_slices"]["count"] == 4
    assert [each["count"] for each in seen] == [2, 4]
    assert in_loop.change.parts == 2


def test_a_plan_that_cannot_make_up_for_what_slices_need_more_is_not_run():
    chosen, _, seen = carried_out({(2, 1): 100, (4, 1): 80}, parts=(2, 2, 4))
    assert (is_made_by_loop(chosen.change), chosen.change.parts, seen) == (
        True,
        2,
        [{"count": 2}, {"count": 4}],
    )


def test_where_the_model_refuses_slices_the_loop_divides():
    chosen, _, seen = carried_out({(2, 1): None, (4, 1): None})
    assert (chosen.change.parts, seen) == (2, [{"count": 2}])


@pytest.mark.parametrize("settings", [{"by_option": True}, {"by_engine": True}, {"dim": None}])
def test_what_divides_batches_by_itself_and_unknown_dimensions_need_no_slices(settings):
    chosen, _, seen = carried_out({}, **settings)
    assert (chosen.change.parts, seen) == (2, [])


def test_slices_along_another_dimension():
    chosen, *_ = carried_out({(2, 1): 60}, dim=1)
    assert chosen.change.plan["batch_slices"] == {"count": 2, "dim": 1}


@pytest.mark.parametrize(
    ("whole", "parts", "dim"),
    [
        ([(32, 8)], [(16, 8)], 0),
        ([(35, 32), (35, 32)], [(35, 16), (35, 16)], 1),
        ([(32,), (32, 3, 8, 8)], [(16,), (16, 3, 8, 8)], 0),
        ([(32,)], [(16,)], 0),
        ([(32, 64)], [(16, 32)], None),
        ([(32, 8), (2, 32, 9)], [(16, 8), (2, 16, 9)], 0),  # such as a recurrent state
        ([(8, 8)], [(8, 8)], None),
        ([], [], None),
    ],
)
def test_the_dimension_of_samples_is_the_one_that_becomes_smaller(whole, parts, dim):
    assert dimension_of_samples(StepInputs(shapes=tuple(whole)), StepInputs(shapes=tuple(parts)), 2) == dim
