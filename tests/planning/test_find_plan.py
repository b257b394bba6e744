"""The search for a plan, with runs that are computed instead of made."""

import io
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from memfit.analysis.trial_result import TrialResult
from memfit.errors import TargetError
from memfit.planning.checkpointing_bases import CheckpointingBases
from memfit.planning.find_plan import find_plan
from memfit.planning.plan_search_base import PlanSearch
from memfit.planning.run_changes_on_ghost import PlannedScript
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import Action, Change, EventLabel, Phase, ScriptEnd, ScriptPlan
from memfit.report.public_json import public_json_type, result_to_json
from memfit.report.terminal.plan_chart import plan_chart_lines
from memfit.report.terminal.script_plan import print_plan
from support.planned_script import (
    MIB,
    OUTSIDE,
    Script,
    copy,
    find,
    needing,
    planned,
    work,
)
from support.traces import BASE, Event, events_of, freed


def test_a_script_that_fits_needs_no_plan():
    script = Script()
    found = planned(script, 1.05)
    assert found.chosen is found.as_written
    assert not script.changes
    assert not found.chosen.changes


def test_the_first_plan_is_enough_if_the_prediction_is_right():
    script = Script()
    found = planned(script, 0.7)
    assert found.chosen.needs.bytes <= found.budget < found.as_written.needs.bytes
    assert found.chosen.time > 1.0
    assert found.bound <= found.chosen.time
    assert found.models == ("Net (optimizer: t:1)",)
    assert found.chosen in found.tried


@pytest.mark.parametrize("more", [100, 200])
def test_a_plan_over_the_budget_is_tightened_until_it_fits(more):
    script = Script(more=lambda _: more)
    found = planned(script, 0.7)
    assert len(script.changes) > 1
    first, *_ = found.tried
    assert first.needs.bytes > found.budget
    assert found.chosen is not None
    assert found.chosen.needs.bytes <= found.budget


def test_no_plan_that_did_not_fit_is_chosen_and_each_ran():
    script = Script(more=lambda run: 150 * (run % 2))
    found = planned(script, 0.6)
    assert len(found.tried) == len(script.changes)
    assert found.chosen is None or found.chosen.needs.bytes <= found.budget


def test_below_what_any_plan_reaches_the_smallest_is_reported():
    script = Script()
    found = planned(script, 0.1)
    assert found.chosen is None
    assert found.smallest.needs.bytes == min(run.needs.bytes for run in found.tried) > found.budget
    assert "recompute" in found.reason


def test_every_block_is_checkpointed_where_the_program_finds_no_plan_that_fits():
    script = Script()
    budget = 100 * MIB + OUTSIDE
    assert find(script, budget).chosen is None
    script.every_block = TrialResult(needing(100), ("Net",), operations=script.step)
    found = find(script, budget)
    assert found.chosen.change.plan == {"checkpointing": {}}
    assert (found.chosen.needs.bytes, found.chosen.time, found.models) == (budget, 1.0, ("Net",))
    script.every_block = TrialResult(needing(120), operations=script.step)
    found = find(script, budget)
    assert found.chosen is None
    assert found.smallest.needs.bytes == budget + 20 * MIB


def test_every_block_is_checkpointed_where_chosen_regions_are_refused():
    script = Script()
    script.every_block = TrialResult(needing(100), ("Net",), operations=script.step)

    def run(change, what):
        has_regions = any(change.plan.values())
        return ScriptEnd("refused", 0, "a backward runs twice") if has_regions else script(change, what)

    assert find(run, 100 * MIB + OUTSIDE).chosen.change.plan == {"checkpointing": {}}


def test_inputs_are_offloaded_only_where_recomputation_is_not_enough():
    script = Script(blocks=24)
    recomputed, offloaded = (
        chooser.smallest.peak / script.chooser.plain_peak for chooser in (script.chooser, script.offloading)
    )
    assert offloaded < 0.9 * recomputed
    enough = planned(script, 1.06 * recomputed)
    assert "offload" not in enough.chosen.change.plan
    less = planned(script, (offloaded + recomputed) / 2)
    assert less.chosen.change.plan["offload"] == {"what": "inputs"}
    assert less.chosen.time > enough.chosen.time


def test_where_no_plan_may_fit_only_the_one_predicted_to_need_least_is_run():
    script = Script(blocks=24)
    recomputed, offloaded = (
        chooser.smallest.peak / script.chooser.plain_peak for chooser in (script.chooser, script.offloading)
    )
    assert offloaded < recomputed / 1.1
    found = planned(script, offloaded / 1.2)
    assert found.chosen is None
    assert len(script.changes) == 1
    assert found.smallest.change.plan["offload"] == {"what": "inputs"}
    assert "None of these plans fits" in found.reason
    assert found.floor is None
    assert "NO PLAN FITS   the smallest needs" in str(found)


def test_the_smallest_is_run_where_no_kind_of_plan_can_fit(monkeypatch):
    monkeypatch.setattr(CheckpointingBases, "can_fit", lambda *_: False)
    script = Script()
    least = script.chooser.smallest.peak / script.chooser.plain_peak
    found = planned(script, least / 1.2)
    assert found.chosen is None
    assert len(script.changes) == 1
    assert found.smallest.needs.bytes < found.as_written.needs.bytes
    assert found.smallest.change.plan["checkpointing"]


@pytest.mark.parametrize("over", [1.02, 1.2])
def test_a_plan_that_needs_less_than_predicted_may_fit(over):
    script = Script(more=lambda _: -80)
    least = script.offloading.smallest.peak / script.chooser.plain_peak
    found = planned(script, least / over)
    assert found.chosen.needs.bytes <= found.budget


def test_a_model_in_which_nothing_can_be_saved_is_not_run_again():
    script = Script()
    forward = tuple(replace(each, call=0) for each in script.step.forward)
    script.step = replace(script.step, calls=script.step.calls[:1], forward=forward)
    found = planned(script, 0.5)
    assert (found.chosen, script.changes) == (None, [])
    assert found.smallest.needs == found.as_written.needs
    assert "At the smallest peak, in the setup, there are: " in found.reason


def test_a_refused_plan_is_no_plan_and_says_why():
    script = Script()
    found = find(
        lambda change, what: (
            script(change, what) if change.operations else ScriptEnd("refused", 0, "it has a plan")
        ),
        int(0.7 * script.plain) * MIB + OUTSIDE,
    )
    assert found.chosen is None
    assert "it has a plan" in found.reason


def test_a_script_that_fails_cannot_be_planned():
    with pytest.raises(TargetError, match=r"ValueError: no \(train.py:3\)"):
        find(lambda *_: ScriptEnd("exception", 1, "ValueError: no", "train.py:3"), 1 << 30)


def test_a_script_without_a_second_step_is_not_planned():
    script = Script()
    found = find(lambda change, what: replace(script(change, what), operations=None), 1 << 30)
    assert found.chosen is None
    assert "no optimizer stepped twice" in found.reason
    assert Change() not in script.changes


def test_every_block_is_checkpointed_before_the_optimizer_changes_where_the_model_predicts_too_much():
    script = Script()
    script.every_block = TrialResult(needing(20), ("Net",), operations=script.step)
    budget = script.chooser.least.peak // 2 + OUTSIDE
    ran = []

    def run(change, what):
        ran.append(change.plan)
        return script(change, what)

    assert find(run, budget).chosen.change.plan == {"checkpointing": {}}
    assert ran == [{}, {"checkpointing": {}}]


class OtherNumerics(Script):
    """A script that holds half as much under autocast."""

    def __call__(self, change, what):
        if change.plan.keys() != {"precision"}:
            return super().__call__(change, what)
        assert change.operations
        return TrialResult(needing(self.plain // 2), ("Net (optimizer: t:1)",), operations=self.step)


def test_other_numerics_are_used_if_they_are_allowed_and_lower_the_peak():
    script = OtherNumerics()
    budget = int(0.55 * script.plain) * MIB + OUTSIDE
    found = find(script, budget, AllowedChanges(precisions=("amp",)))
    assert found.chosen.change.plan == {"precision": {"dtype": "bf16"}}
    assert (found.chosen.equality, found.models) == ("other numerics", ("Net (optimizer: t:1)",))
    assert "precision" not in (find(script, budget).chosen or found.as_written).change.plan


class WithPolicies(Script):
    """A script that people would checkpoint by hand."""

    def __init__(self):
        super().__init__()
        self.needs = {None: 0.4, 2: 0.6}

    def __call__(self, change, what):
        settings = change.plan.get("checkpointing")
        if settings is None or "regions" in settings:
            return super().__call__(change, what)
        assert change.operations
        if "save_ops" in settings:
            return ScriptEnd("refused", 0, "no such block")
        share = self.needs[settings.get("every")]
        return TrialResult(needing(int(share * self.plain)), operations=self.step)


def test_policies_that_people_use_are_run_and_drawn_beside_the_plan():
    script = WithPolicies()
    planned_script = PlannedScript(script, work, copy, "a rule")
    found = find_plan(planned_script, int(0.7 * script.plain) * MIB + OUTSIDE, policies=True)
    assert [run.change.plan["checkpointing"] for run in found.policies] == [{}, {"every": 2}]
    assert found.policies[0].needs.bytes < found.policies[1].needs.bytes
    assert all(run not in found.tried for run in found.policies)
    lines = list(plan_chart_lines(found))
    drawn = "".join(line.partition("│")[2] for line in lines)
    assert {mark: drawn.count(mark) for mark in "0*ab"} == {"0": 1, "*": 1, "a": 1, "b": 1}
    assert "a checkpoint every block: " in "\n".join(lines)
    cheapest = [line for line in lines if line.startswith("   1.00x │")]
    assert len(cheapest) == 1
    assert cheapest[0].endswith("0")  # as written: the most memory, the least time


def test_the_result_prints_and_is_valid_json():
    found = planned(Script(), 0.7)
    text = io.StringIO()
    print_plan(found, Console(file=text, width=200, highlight=False, markup=False))
    assert text.getvalue().startswith("PLAN FOUND   needs ")
    assert "no plan that memfit weighed takes less than" in text.getvalue()
    public = json.loads(result_to_json(found))
    again = msgspec.convert(public, public_json_type(ScriptPlan))
    assert again.plan == found.chosen.change.plan
    assert msgspec.to_builtins(again.needs) == msgspec.to_builtins(found.chosen.needs)
    assert len(again.tried) == len(found.tried)


def test_what_to_run_and_write_names_the_file_of_the_plan_quoted():
    found = replace(planned(Script(), 0.7), command=("train.py", "--name", "a b"))
    text = io.StringIO()
    print_plan(found, Console(file=text, width=200, highlight=False, markup=False), Path('my "8GiB".json'))
    assert """memfit train --plan 'my "8GiB".json' train.py --name 'a b'""" in text.getvalue()
    assert r"""memfit.apply(model, "my \"8GiB\".json")""" in text.getvalue()
    assert "-o plan.json" not in text.getvalue()


class OffloadingSearch(PlanSearch):
    """Chooses to offload activations, and nothing else."""

    policies, _undivided = tuple, ""

    def _search_from(self, tuned):
        self._runs.models = ("Net",)
        return self._answer(chosen=replace(tuned, change=Change({"offload": {}})))


def test_a_plan_of_offload_alone_is_printed_with_the_call_that_applies_it():
    plain = TrialResult(needing(200), operations=Script().step)
    script = PlannedScript(lambda *_: plain, lambda *_: plain, work, copy, "a rule")
    found = OffloadingSearch(script, plain, 100 * MIB + OUTSIDE, AllowedChanges(), lambda _: None).plan()
    text = io.StringIO()
    print_plan(found, Console(file=text, width=200, highlight=False, markup=False))
    assert 'memfit.apply(model, "plan.json")' in text.getvalue()


def test_log_probabilities_are_named_with_a_plan_if_they_are_much():
    found = planned(Script(), 0.7)
    much = replace(found, log_probabilities=found.as_written.needs.bytes // 10)
    assert "memfit.ChunkedHead" in str(much)
    assert "memfit.ChunkedHead" not in str(found)
    fits = replace(much, chosen=much.as_written)
    assert "memfit.ChunkedHead" not in str(fits)


def test_a_script_that_may_fit_with_smaller_workspaces_is_said_to():
    found = planned(Script(), 0.7)
    words = "without the workspaces of convolutions"
    assert found.without_workspaces == 0
    assert words not in str(found)
    assert words in str(replace(found, without_workspaces=found.budget))
    assert words not in str(replace(found, without_workspaces=found.budget + 1))


def test_what_an_update_alone_allocates_is_not_to_be_recomputed():
    script = Script()

    def run(change, what):
        result = script(change, what)
        if isinstance(result, ScriptEnd):  # of every block checkpointed
            return result
        history = [(Action.SEGMENT_ALLOC, BASE, script.plain * MIB), (Action.ALLOC, BASE, script.plain * MIB)]
        history = [Event(*each, label=0) for each in history] + freed(BASE, script.plain * MIB, label=0)
        label = EventLabel(Phase.OPTIMIZER, "", "AdamW.step", -1)
        return replace(result, trace=replace(result.trace, events=events_of(history), labels=(label,)))

    found = find(run, int(0.7 * script.plain) * MIB + OUTSIDE)
    assert (found.chosen, script.changes) == (None, [])
    assert found.smallest.place.phase is Phase.OPTIMIZER
    assert found.floor.bytes == script.plain * MIB + OUTSIDE
    assert "every plan needs at least" in str(found)
    assert "temporaries" in found.reason
    assert planned(script, 0.7).chosen is not None
    assert script.changes
