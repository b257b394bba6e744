"""The times of plans that ran: those of their own steps, with runs that are computed instead of made."""

from dataclasses import replace

import pytest

from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import Change, HostUnits, ScriptEnd
from support.planned_script import MIB, OUTSIDE, Script, find, planned, timed

AS_WRITTEN = 100
"""Products in a step as written."""


class Timed(Script):
    """A script with steps that run as many products as its plans say.

    Args:
        products: in a step under the plans, in the order in which they run; the last of them also afterwards.
    """

    def __init__(self, products, **settings):
        super().__init__(**settings)
        self.products = products

    def __call__(self, change, what):
        result = super().__call__(change, what)
        if isinstance(result, ScriptEnd):
            return result
        count = AS_WRITTEN
        if change.strategies:
            count = self.products[min(len(self.changes), len(self.products)) - 1]
        return replace(result, trace=timed(result.trace, count))


def first_is_too_large_second_too_small(number):
    return (200, -40)[number] if number < 2 else 0


def times(found):
    return [round(run.time, 6) for run in found.tried]


def test_a_plan_that_ran_takes_what_its_own_step_takes():
    script = Timed([150, 130, 140], more=first_is_too_large_second_too_small)
    found = planned(script, 0.7)
    assert times(found)[:3] == [1.5, 1.3, 1.4]
    fitting = [run for run in found.tried if run.needs.bytes <= found.budget]
    assert len(fitting) > 1
    assert found.chosen.time == min(run.time for run in fitting) == pytest.approx(1.3)
    assert found.seconds == pytest.approx(1.3 * found.step_time.seconds)
    assert 1.0 <= found.bound <= found.chosen.time


def test_the_plan_that_is_predicted_to_be_faster_is_not_chosen_if_its_step_is_slower():
    alike = [110] * 9
    order = planned(Timed(alike, more=first_is_too_large_second_too_small), 0.7).tried
    slow = [index for index, run in enumerate(order) if run.needs.bytes <= planned_budget(0.7)][1]
    products = [300 if index == slow else 110 for index in range(9)]
    found = planned(Timed(products, more=first_is_too_large_second_too_small), 0.7)
    assert found.tried[slow].time == pytest.approx(3.0)
    assert found.chosen.time == pytest.approx(1.1)


def planned_budget(share):
    return int(share * Script().plain) * MIB + OUTSIDE


def test_a_plan_is_too_slow_by_its_own_step():
    script = Timed([150])
    found = find(script, int(0.7 * script.plain) * MIB + OUTSIDE, AllowedChanges(slowdown=1.4))
    assert (found.chosen, found.too_slow.time) == (None, pytest.approx(1.5))


def test_predictions_of_a_base_follow_what_its_runs_took():
    """A run that takes ten times as much more as predicted leaves nothing that may be fast enough."""
    quick, slow = Timed([100]), Timed([400])
    for script in (quick, slow):
        script.more = first_is_too_large_second_too_small
    budget = int(0.7 * slow.plain) * MIB + OUTSIDE
    allowed = AllowedChanges(slowdown=1.2)
    find(quick, budget, allowed)
    assert find(slow, budget, allowed).too_slow.time == pytest.approx(4.0)
    assert len(slow.changes) <= len(quick.changes)


def test_a_script_that_checkpoints_itself_and_is_limited_by_the_host_runs_once_more_for_its_time():
    """Under the record of its operations, its regions seem to save more tensors."""
    script = Script(more=first_is_too_large_second_too_small)
    asked = []

    def run(change, what):
        asked.append(change)
        count = 100 if change.operations else 40
        host = HostUnits(checkpointed_regions=4, operations=1e6 * count)
        result = script(change, what) if change != Change() else script(Change(operations=True), what)
        return (
            result if isinstance(result, ScriptEnd) else replace(result, trace=timed(result.trace, 1, host))
        )

    found = find(run, int(0.7 * script.plain) * MIB + OUTSIDE)
    assert asked[:2] == [Change(operations=True), Change()]
    assert found.chosen.time == pytest.approx(1.0)
