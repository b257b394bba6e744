"""Plans where the CUDA context is assumed: they leave free what it may be larger by, if they can."""

import io
import json
from dataclasses import replace

from rich.console import Console

from memfit.planning.find_plan import find_plan
from memfit.planning.run_changes_on_ghost import PlannedScript
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.report.public_json import result_to_json
from memfit.report.terminal.script_plan import print_plan
from support.planned_script import MIB, OUTSIDE, SPREAD, Script, assumed, copy, find, work

UNCERTAIN = round(SPREAD * OUTSIDE) // MIB
"""MiB by which the context may be larger."""


def under(script, mebibytes, allowed=AllowedChanges(), spread=SPREAD):  # noqa: B008 - frozen
    """Return the plan for a script with an assumed context, for a budget of so much beside it."""
    return find(assumed(script, spread), mebibytes * MIB + OUTSIDE, allowed)


def sure(script, mebibytes):
    """Return the plan if the context were measured."""
    return find(script, mebibytes * MIB + OUTSIDE)


def printed(found):
    text = io.StringIO()
    print_plan(found, Console(file=text, width=200, highlight=False, markup=False))
    return text.getvalue()


def incompressible():
    """Return a script in which nothing can be recomputed."""
    script = Script()
    forward = tuple(replace(each, call=0) for each in script.step.forward)
    script.step = replace(script.step, calls=script.step.calls[:1], forward=forward)
    return script


def reserved(peak):
    """Return the MiB that PyTorch reserves for so many bytes: a multiple of 20, as for any large request."""
    return -(-peak // (20 * MIB)) * 20


def plain(script):
    """Return the MiB that a script needs as written, beside the context."""
    return reserved(script.chooser.plain_peak)


def smallest(script):
    """Return the MiB that a script needs at least, with any plan."""
    return reserved(min(script.chooser.least.peak, script.offloading.least.peak))


def test_a_plan_that_is_not_tight_is_the_one_for_what_is_certainly_free():
    script, other = Script(), Script()
    budget = int(0.7 * script.plain)
    found, expected = under(script, budget), sure(other, budget - UNCERTAIN)
    assert (found.chosen.change.plan, found.chosen.time) == (
        expected.chosen.change.plan,
        expected.chosen.time,
    )
    assert script.changes == other.changes
    assert not found.is_tight
    assert "PLAN FOUND   needs" in printed(found)
    assert "no plan that memfit weighed, tight ones apart, takes less than" in printed(found)
    assert json.loads(result_to_json(found))["is_tight"] is False


def test_a_script_that_fits_only_tightly_gets_a_plan_that_does_not():
    script = Script()
    found = under(script, plain(script) + 1)
    assert found.chosen.change.plan
    assert found.chosen.needs.bytes <= found.budget - found.uncertainty
    assert not found.is_tight


def test_a_script_that_fits_tightly_and_has_no_plan_is_not_said_to_fit_for_certain():
    script = incompressible()
    found = under(script, plain(script) + 1)
    assert found.chosen is found.as_written
    assert (found.is_tight, script.changes) == (True, [])
    assert printed(found).startswith("NO PLAN NEEDED, TIGHT   as written, the script needs ")
    assert "it may not fit" in printed(found)
    assert "may be up to 50.0 MiB larger" in printed(found)


def test_the_only_plan_that_fits_is_tight():
    script = Script()
    found = under(script, smallest(script) + UNCERTAIN // 2)
    assert found.budget - found.uncertainty < found.chosen.needs.bytes <= found.budget
    assert printed(found).startswith("PLAN FOUND, TIGHT   needs ")
    assert "none of the plans that ran leaves that much" in printed(found)
    assert (found.is_tight, json.loads(result_to_json(found))["is_tight"]) == (True, True)


def test_of_the_tight_plans_the_fastest_is_chosen_and_the_runs_are_not_doubled():
    script, other = Script(), Script()
    budget = smallest(script) + UNCERTAIN - 2
    found, expected = under(script, budget), sure(other, budget)
    assert found.chosen.time < max(run.time for run in found.tried)
    assert found.chosen.time <= expected.chosen.time + 0.003
    assert len(script.changes) <= len(other.changes) + 2


def test_where_every_plan_is_tight_the_whole_budget_is_looked_for_from_the_beginning():
    script, other = Script(), Script()
    budget = int(0.7 * script.plain)
    found, expected = under(script, budget, spread=7.0), sure(other, budget)
    assert (found.is_tight, found.chosen.change.plan) == (True, expected.chosen.change.plan)
    assert found.bound == expected.bound
    assert script.changes == other.changes


def test_no_plan_fits_what_not_even_a_tight_one_does():
    script, other = Script(), Script()
    budget = smallest(script) // 2
    found, expected = under(script, budget), sure(other, budget)
    assert (found.chosen, found.is_tight) == (None, False)
    assert found.smallest.needs.bytes == expected.smallest.needs.bytes
    assert len(script.changes) <= len(other.changes)


def test_a_tight_plan_that_is_fast_enough_is_chosen_before_one_that_is_too_slow():
    script = Script()
    budget = sure(Script(), int(0.7 * script.plain)).chosen.reserved.bytes // MIB + UNCERTAIN - 1
    slow, fast = sure(Script(), budget - UNCERTAIN).chosen.time, sure(Script(), budget).chosen.time
    assert fast < slow
    found = under(script, budget, AllowedChanges(slowdown=(fast + slow) / 2))
    assert found.is_tight
    assert found.too_slow is None
    assert found.chosen.time <= (fast + slow) / 2


def test_a_tight_plan_is_the_answer_so_far_until_there_is_another():
    script, so_far = Script(), []
    run = assumed(script)
    planned = PlannedScript(run, work, copy, "a rule")
    found = find_plan(planned, (plain(script) + 1) * MIB + OUTSIDE, on_found=so_far.append)
    assert so_far[0].chosen is so_far[0].as_written
    assert [each.is_tight for each in so_far] == [True, *[False] * (len(so_far) - 1)]
    assert so_far[-1].chosen is found.chosen
