"""What a search answers before it ends: the fastest plan so far, as soon as there is one."""

import pytest

from memfit.errors import TargetError
from memfit.planning.find_plan import find_plan
from memfit.planning.plan_search_base import OutOfTimeError
from memfit.planning.run_changes_on_ghost import PlannedScript
from support.planned_script import MIB, OUTSIDE, Script, copy, work


class Watched:
    """A search for a plan: its runs and its answers in order.

    Args:
        runs: after which the time for it is over.
        share: of what the script needs, its budget.
    """

    def __init__(self, runs=100, share=0.7):
        # The first plan is over the budget, and the second leaves much of it free: others run after it.
        self.script = Script(more=lambda number: (200, -40)[number] if number < 2 else 0)
        self.runs, self.events = runs, []
        self.budget = int(share * self.script.plain) * MIB + OUTSIDE

    def _run(self, change, what):
        if self.events.count("run") == self.runs:
            raise OutOfTimeError
        self.events.append("run")
        return self.script(change, what)

    def find(self):
        planned = PlannedScript(self._run, work, copy, "a rule")
        return find_plan(planned, self.budget, on_found=self.events.append)

    @property
    def answers(self):
        return [each for each in self.events if each != "run"]


def test_an_answer_is_there_as_soon_as_a_plan_fits_and_again_for_each_faster_one():
    search = Watched()
    found = search.find()
    first = search.events.index(search.answers[0])
    assert 2 <= first < len(search.events) - 2
    assert "run" in search.events[first:]
    times = [each.chosen.time for each in search.answers]
    assert times == sorted(times, reverse=True)
    assert times[-1] == found.chosen.time < times[0]
    assert all(each.chosen.needs.bytes <= search.budget for each in search.answers)


def test_a_search_that_is_out_of_time_answers_with_the_fastest_plan_so_far():
    whole = Watched()
    whole.find()
    enough = whole.events[: whole.events.index(whole.answers[0])].count("run")
    search = Watched(runs=enough)
    found = search.find()
    assert found.out_of_time
    assert found.chosen.change.plan == whole.answers[0].chosen.change.plan
    assert found.bound == 0.0
    assert "PLAN FOUND   needs" in str(found)
    assert "there may be a faster plan" in str(found)


def test_out_of_time_before_anything_fits_is_no_claim_that_nothing_does():
    search = Watched(runs=2)
    found = search.find()
    assert (found.out_of_time, found.chosen, search.answers) == (True, None, [])
    assert found.smallest is found.tried[0]
    text = str(found)
    assert text.startswith("NO PLAN FOUND IN TIME   the smallest so far needs ")
    assert "NO PLAN FITS" not in text


def test_out_of_time_before_the_script_has_run_is_an_error():
    with pytest.raises(TargetError, match="over before the script had run once"):
        Watched(runs=0).find()
