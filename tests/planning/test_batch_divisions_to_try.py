"""Batches that the search for a plan divides, with runs that are computed instead of made."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from memfit.analysis.trial_result import TrialResult
from memfit.planning import checkpointing_bases
from memfit.planning.batch_divisions_to_try import BatchDivisionsToTry
from memfit.planning.checkpointing_bases import CheckpointingBases
from memfit.planning.choose_checkpointing import CheckpointChooser
from memfit.planning.run_changes_on_ghost import forward_and_backward_seconds
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import (
    Change,
    LoaderBatchSize,
    ScriptEnd,
    ScriptOption,
    ScriptOptionPurpose,
    StepInputs,
    StepOperations,
)
from memfit.report.public_json import result_to_json
from support.advised_runs import trace
from support.planned_networks import feed_forward
from support.planned_script import (
    MIB,
    OUTSIDE,
    SPREAD,
    Script,
    assumed,
    chosen_ways,
    enlarged,
    find,
    needing,
    planned,
    work,
)


class BatchedScript(Script):
    """A script with a loader of 128 samples."""

    def __init__(self, refuses=lambda _: False, step=None):
        super().__init__()
        self.refuses = refuses
        self.divided = []
        self.steps = {size: self._recorded(size) for size in (128, 64, 32, 16)}
        self.step = self.steps[128]
        if step is not None:
            self.steps[64] = step

    @staticmethod
    def _recorded(samples):
        torch.manual_seed(0)
        network = feed_forward(samples=samples)
        network.gradients()
        step = enlarged(network.record())
        # The model returns its loss: with batch slices, nothing runs again.
        return replace(step, forward=tuple(replace(each, call=max(each.call, 0)) for each in step.forward))

    def __call__(self, change, what):
        loader = LoaderBatchSize(128, "t.py:7")
        if change.loader is None and change.operations:
            return replace(super().__call__(change, what), trace=needing(self.plain, loader=loader))
        if change.loader is None:
            return super().__call__(change, what)
        assert change.updates_held_back == 128 // change.loader.size
        self.divided.append(change.updates_held_back)
        if self.refuses(change):
            return ScriptEnd("refused", 0, "it drops gradients")
        if change.strategies == {"checkpointing": {}}:
            return self.every_block
        step = self.steps[change.loader.size]
        chooser = CheckpointChooser(step or self.step, work)
        peak = chooser.plain_peak
        if change.strategies:
            regions = change.strategies["checkpointing"]["regions"]
            peak = self._peak(chosen_ways(regions), chooser)
        return TrialResult(needing(-(-peak // MIB)), ("Net (optimizer: t:1)",), operations=step)


def test_batches_are_divided_where_that_takes_less_time_than_recomputation():
    script = BatchedScript()
    found = planned(script, 0.55)
    divided = found.in_loop.change.micro_batches
    assert (divided.count, divided.size, divided.where, divided.draws) == (2, 64, "t.py:7", True)
    assert found.in_loop.change.plan == {"accumulation": {"parts_per_batch": 2}}
    assert 1.0 <= found.bound <= found.in_loop.time < 1.05 < found.chosen.time
    assert (found.in_loop.equality, script.divided) == ("up to rounding", [2])
    written = json.loads(result_to_json(found))["in_loop"]
    assert written["micro_batches"]["loader"]["size"] == 64


def test_where_slices_are_not_known_to_suit_the_model_whole_batches_are_recomputed():
    """The recorded steps say nothing of what the model is passed: not along which dimension samples lie."""
    found = planned(BatchedScript(), 0.55)
    assert found.chosen.change.plan.keys() == {"checkpointing"}
    assert found.chosen.equality == "bit for bit"


@pytest.mark.parametrize(("budget", "parts"), [(0.55, [2]), (0.3, [2, 4])])
def test_a_loop_that_would_save_time_is_named_beside_recomputation(monkeypatch, budget, parts):
    """Slices that run twice cost more than recomputation, and what the loop would divide costs nothing."""
    monkeypatch.setattr(f"{checkpointing_bases.__name__}.seconds_to_run_model_again", twice_a_step)
    script = BatchedScript()
    found = planned(script, budget)
    assert found.chosen.change.plan.keys() == {"checkpointing"}
    assert (found.in_loop.change.parts, script.divided) == (parts[-1], parts)
    assert found.bound <= found.in_loop.time < found.chosen.time - 0.05


def test_modules_of_slices_are_not_recomputed_in_parts(monkeypatch):
    """Slices refuse split_at: where plans of micro-batches had it, none with slices could be run."""
    seen = []

    def chooser(*given, in_parts, **options):
        seen.append(in_parts)
        return CheckpointChooser(*given, in_parts=in_parts, **options)

    monkeypatch.setattr("memfit.planning.checkpointing_bases.CheckpointChooser", chooser)
    planned(BatchedScript(), 0.3)
    assert seen == [True, False, False]  # whole batches, two parts, four


def test_batches_are_divided_no_further_than_needed():
    script = BatchedScript()
    assert planned(script, 0.3).in_loop.change.micro_batches.count == 4
    assert script.divided == [2, 4]


def twice_a_step(step, seconds):
    return 2 * forward_and_backward_seconds(step, seconds)


class Undiminished(BatchedScript):
    """A script that needs 0.9 of what it does as written whatever its batches are, and has a plan of its own.

    Args:
        more: MiB that divided batches need beside the rest, by the number of parts.
    """

    def __init__(self, more):
        super().__init__()
        self.more_in_parts = more

    def __call__(self, change, what):
        if change.strategies:
            return ScriptEnd("refused", 0, "it has a plan")
        result = super().__call__(change, what)
        if change.loader is None:
            return result
        more = self.more_in_parts(change.parts)
        return replace(result, trace=needing(round(0.9 * self.plain + more)))


def test_a_division_that_needs_no_less_than_the_one_before_is_the_last():
    script = Undiminished(more=lambda _: 0)
    found = planned(script, 0.6)
    assert script.divided == [2, 4]
    assert "smaller parts would need at least" in found.undivided


def test_divisions_end_where_the_line_through_two_of_them_does_not_reach_the_budget():
    script = Undiminished(more=lambda parts: 0.4 * script.plain / parts)
    assert planned(script, 0.85).chosen is None
    assert script.divided == [2, 4]
    script = Undiminished(more=lambda parts: 0.4 * script.plain / parts)
    script.steps |= {8: None, 4: None}
    planned(script, 0.91)
    assert script.divided == [2, 4, 8, 16]


def test_divisions_end_where_one_fits_tightly_and_no_other_can_be_less_tight():
    script = Undiminished(more=lambda _: 0)
    script.steps |= {8: None}
    needed = round(0.9 * script.plain) * MIB + OUTSIDE
    found = find(assumed(script), needed + round(0.5 * SPREAD * OUTSIDE))
    assert (found.is_tight, found.chosen.change.micro_batches.count) == (True, 2)
    assert script.divided == [2, 4]


class Sliced(BatchedScript):
    """A script whose slices need more than its micro-batches.

    Args:
        more: MiB that slices need beside the micro-batches, by their number.
        less: MiB that they need less if something is recomputed.
    """

    def __init__(self, more, less=0):
        super().__init__()
        self.more_in_slices, self.less, self.sliced = more, less, []
        for size, step in self.steps.items():
            self.steps[size] = replace(step, samples=StepInputs(shapes=((size, 8),)))
        self.step = self.steps[128]

    def __call__(self, change, what):
        slices = change.plan.get("batch_slices")
        if slices is None:
            return super().__call__(change, what)
        count = slices["count"]
        self.sliced.append(count)
        peak = CheckpointChooser(self.steps[128 // count], work).plain_peak
        peak -= self.less * MIB if "checkpointing" in change.plan else 0
        return TrialResult(needing(-(-peak // MIB) + self.more_in_slices[count]), ("Net (optimizer: t:1)",))


@pytest.mark.parametrize(
    ("less", "count", "ran"), [(0, 8, [2, 2, 4, 4, 8]), (40, 2, [2, 2])], ids=["smaller", "recomputed"]
)
def test_where_slices_are_tight_more_is_recomputed_before_smaller_ones_are_tried(less, count, ran):
    halves = CheckpointChooser(Sliced({}).steps[64], work).plain_peak // MIB
    room = halves + round(SPREAD * OUTSIDE) // MIB + 20  # within which the micro-batches are not tight
    script = Sliced({2: 40, 4: 300, 8: 0}, less)
    found = find(assumed(script), room * MIB + OUTSIDE)
    assert (
        script.divided == script.sliced == ran
    )  # the second of a size recomputes what leaves room for slices
    chosen = found.chosen.change.plan
    assert (chosen["batch_slices"], "checkpointing" in chosen) == ({"count": count}, count == 2)
    assert not found.is_tight


def test_recomputation_that_seems_to_need_slightly_too_much_is_run_before_slices_are_chosen(monkeypatch):
    """Only a run shows how far predictions are off: with slices, the step would take twice as long."""
    monkeypatch.setattr(f"{checkpointing_bases.__name__}.seconds_to_run_model_again", twice_a_step)
    script = Sliced({2: 0, 4: 0, 8: 0})
    script.more = lambda _: -40  # beside what is predicted
    least = CheckpointChooser(script.step, work).least.peak // MIB
    found = find(script, (least - 5) * MIB + OUTSIDE)
    assert found.chosen.change.plan.keys() == {"checkpointing"}
    assert found.chosen.time < 1.9


class Offloading(Sliced):
    """A script whose slices need 60 MiB less if the optimizer's state waits on the host."""

    def __call__(self, change, what):
        plan = {name: given for name, given in change.plan.items() if name != "optimizer_state"}
        made = super().__call__(replace(change, plan=plan), what)
        if "optimizer_state" not in change.plan or isinstance(made, ScriptEnd):
            return made
        device = made.trace.device
        context = replace(device.context, bytes=device.context.bytes - 60 * MIB)
        return replace(made, trace=replace(made.trace, device=replace(device, context=context)))


def test_where_slices_do_not_fit_another_optimizer_is_tried_before_the_loop_is_changed(monkeypatch):
    def roots(bases):
        if bases._runs.chosen is None:  # beside a plan that fits, copies to the host take too long
            plan = Change({"optimizer_state": {"offload": True}})
            yield bases.base(plan, *bases._runs.make(plan, 1.3, operations=True))

    monkeypatch.setattr(CheckpointingBases, "roots_with_other_optimizers", roots)
    script = Offloading(dict.fromkeys((2, 4, 8), 50))
    script.refuses = lambda change: change.parts > 8
    found = find(script, CheckpointChooser(script.steps[16], work).plain_peak + OUTSIDE + 15 * MIB)
    assert found.chosen.change.plan.keys() >= {"batch_slices", "optimizer_state"}
    assert found.chosen.needs.bytes <= found.budget
    assert found.in_loop.change.micro_batches.by_hand
    assert found.bound <= found.in_loop.time < found.chosen.time


def test_where_only_bits_count_batches_stay_whole():
    script = BatchedScript()
    found = find(script, int(0.55 * script.plain) * MIB + OUTSIDE, AllowedChanges(rounding=False))
    assert (script.divided, found.undivided) == ([], "")
    assert found.chosen is None or found.chosen.equality == "bit for bit"


def test_batches_are_not_divided_where_samples_depend_on_each_other():
    script = BatchedScript(step=enlarged(feed_forward(blocks=3, samples=64).record()))
    found = planned(script, 0.7)
    assert found.undivided == "with half the samples, the step runs other operations"
    assert (script.divided, found.chosen.change.micro_batches) == ([2], None)
    assert "checkpointing" in found.chosen.change.plan


def test_batches_are_not_divided_where_the_script_ends_before_it_can_be_seen():
    script = BatchedScript()
    script.steps[64] = None
    found = planned(script, 0.7)
    assert found.undivided == "memfit saw no two updates of 2 batches each (the script ends before)"
    assert (script.divided, found.chosen.change.micro_batches) == ([2], None)


def test_a_loop_that_cannot_accumulate_is_recomputed_and_the_reason_is_kept():
    script = BatchedScript(refuses=lambda _: True)
    found = planned(script, 0.7)
    assert found.undivided == "it drops gradients"
    assert found.chosen.change.micro_batches is None


def test_modules_are_recomputed_in_micro_batches_where_neither_is_enough():
    script = BatchedScript(refuses=lambda change: change.parts > 2)
    found = planned(script, 0.4)
    assert found.in_loop.change.micro_batches.count == 2
    assert found.in_loop.change.plan.keys() == {"accumulation", "checkpointing"}
    assert found.in_loop.needs.bytes <= found.budget
    assert found.undivided == "it drops gradients"


def test_no_option_divides_batches_where_the_loop_draws_numbers_for_them():
    """Smaller batches would get other noise; slices leave the loop's as it is."""
    options = [
        ScriptOption(ScriptOptionPurpose.BATCH_SIZE, ("-b",), 8),
        ScriptOption(ScriptOptionPurpose.ACCUMULATION, ("--accum",), 1),
    ]
    for random in (False, True):
        step = StepOperations((), (), (), (), samples=StepInputs(random=random))
        plain = TrialResult(trace(1, options=options), operations=step)
        bases = SimpleNamespace()
        divisions = BatchDivisionsToTry(plain, None, bases, 1, AllowedChanges())
        divisions.begin(SimpleNamespace(change=Change()))
        assert divisions.left[0].micro_batches.by_option is not random


def test_a_loss_that_is_a_sum_is_seen_in_the_run_as_written():
    script = BatchedScript()
    forward = [*script.step.forward]
    loss = max(operation.source for operation in script.step.backward)
    forward[loss] = replace(forward[loss], sums=True)
    script.step = replace(script.step, forward=tuple(forward))
    found = planned(script, 0.55)
    assert script.divided == [2]  # to see whether the model's call may divide its batch
    assert (found.in_loop, [run for run in found.tried if run.change.micro_batches]) == (None, [])
    assert 'the loss is a sum over samples (reduction="sum")' in found.undivided
