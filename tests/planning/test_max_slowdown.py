"""Plans that take no longer than a limit, with runs that are computed instead of made."""

import json

import msgspec
import pytest

from memfit.api.plan_and_auto_checkpoint import parse_allowed_changes
from memfit.errors import UsageError
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import ScriptPlan
from memfit.report.public_json import public_json_type, result_to_json
from support.planned_script import MIB, OUTSIDE, Script, find, planned


def limited(script, share, slowdown):
    return find(script, int(share * script.plain) * MIB + OUTSIDE, AllowedChanges(slowdown=slowdown))


def test_a_plan_that_takes_too_long_is_named_but_not_taken():
    taken = planned(Script(), 0.7).chosen
    found = limited(Script(), 0.7, taken.time - 0.01)
    assert (found.chosen, found.smallest) == (None, None)
    assert found.too_slow.change.plan == taken.change.plan
    assert found.too_slow.needs.bytes <= found.budget
    text = str(found)
    assert text.startswith(f"NO PLAN FITS   within {taken.time - 0.01:g} times the time; one that needs ")
    assert f"takes {taken.time:.3f}\n" in text
    assert text.count("<- too slow") == 1
    written = msgspec.convert(json.loads(result_to_json(found)), public_json_type(ScriptPlan))
    assert (written.plan, written.too_slow.time, written.max_slowdown) == (
        None,
        taken.time,
        taken.time - 0.01,
    )


def test_a_plan_that_takes_as_long_as_is_allowed_is_taken():
    taken = planned(Script(), 0.7).chosen
    found = limited(Script(), 0.7, taken.time)
    assert (found.chosen, found.too_slow) == (taken, None)


def test_the_search_ends_with_the_first_plan_that_fits_where_none_can_be_fast_enough():
    more = lambda run: 300 * (run == 0)  # noqa: E731 - the first is over the budget, the others need less
    refined, ended = Script(more), Script(more)
    planned(refined, 0.7)
    found = limited(ended, 0.7, 1.0)
    assert found.too_slow is not None
    assert len(ended.changes) < len(refined.changes)
    assert ended.changes == refined.changes[: len(ended.changes)]


def test_the_search_goes_on_while_a_plan_may_be_fast_enough():
    more = lambda run: 300 * (run == 0)  # noqa: E731
    best = planned(Script(more), 0.7)
    fits = [run for run in best.tried if run.needs.bytes <= best.budget]
    assert best.chosen.time < fits[0].time  # which would be too slow
    assert limited(Script(more), 0.7, best.chosen.time).chosen == best.chosen


def test_below_what_any_plan_reaches_a_limit_of_time_changes_nothing():
    found = limited(Script(), 0.1, 1.0)
    assert (found.chosen, found.too_slow) == (None, None)
    assert found.smallest == planned(Script(), 0.1).smallest


@pytest.mark.parametrize("limit", [0.99, -1.0, float("nan")])
def test_a_limit_that_not_even_the_script_as_written_keeps_is_refused(limit):
    with pytest.raises(UsageError, match=r"max_slowdown is .*give a number of at least 1, for example 1.3"):
        parse_allowed_changes(bitwise=False, max_slowdown=limit)
    assert parse_allowed_changes(bitwise=False, max_slowdown=1).slowdown == 1
