"""The search for plans of compiled scripts, with runs that are computed instead of made."""

import io
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from memfit.analysis.trial_result import TrialResult
from memfit.planning.find_plan import find_plan
from memfit.planning.run_changes_on_ghost import PlannedScript
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import (
    Action,
    DeviceUse,
    Figure,
    LoaderBatchSize,
    Operation,
    Provenance,
    ScriptEnd,
    StepOperations,
)
from memfit.report.public_json import result_to_json
from memfit.report.terminal.script_plan import print_plan
from support.planned_networks import feed_forward
from support.traces import BASE, trace_of

MIB = 1 << 20
OUTSIDE = 100 * MIB
DEVICE = DeviceUse("A100-80GB", Figure(1 << 40, Provenance.EXACT), Figure(OUTSIDE, Provenance.MEASURED), 0)
PLAIN = 1000
"""MiB of the script as written."""
SAMPLES = 128


def kernels(seconds):
    kernel = Operation("op0", -1, -1, (), (0,), (), round(1e9 * seconds), 0, "bfloat16", False, 0.0, 0)
    return StepOperations((0,), (), (kernel,), (), optimizer=0, compiled=True)


def eager(samples):
    torch.manual_seed(0)
    network = feed_forward(samples=samples)
    network.gradients()
    return network.record()


class CompiledScript:
    """A script with a loader of 128 samples, compiled.

    Args:
        needs: MiB by the share of activations that graphs keep, for whole batches.
        divisible: whether it has a loader.
        slower: time that another micro-batch adds, relative to the script as written.
        broken: whether a share makes its compilation fail.
        blocks: MiB with every block checkpointed.
        half: the eager step with half a batch, if not that of independent samples.
    """

    def __init__(
        self, needs, *, divisible=True, slower=0.05, broken=lambda _: False, blocks=PLAIN, half=None
    ):
        self.needs, self.divisible, self.slower = needs, divisible, slower
        self.broken, self.blocks = broken, blocks
        self.eager = {SAMPLES: eager(SAMPLES), SAMPLES // 2: half or eager(SAMPLES // 2)}
        self.ran = []
        self.device = DEVICE

    def __call__(self, change, _what):
        assert change.operations
        samples = change.loader.size if change.loader is not None else SAMPLES
        parts = SAMPLES // samples
        assert change.updates_held_back == (1 if change.eager else parts)
        if change.eager:
            self.ran.append((parts, "eager"))
            return TrialResult(self.trace(PLAIN), operations=self.eager[samples])
        settings = change.strategies
        share = settings.get("compilation", {}).get("activation_memory_budget", 1.0)
        self.ran.append((parts, "blocks" if "checkpointing" in settings else share))
        if self.broken(share):
            return ScriptEnd("exception", 1, "BackendCompilerFailed: no", "t.py:5")
        mebibytes = self.blocks if "checkpointing" in settings else self.needs(share)
        models = ("Net (optimizer: t:1)",) if settings else ()
        # A second micro-batch takes 5 % longer; what is not kept is computed again.
        return TrialResult(
            self.trace(mebibytes / parts),
            models,
            operations=kernels(1 + self.slower * (parts - 1) + 0.2 * (1 - share)),
        )

    def trace(self, mebibytes):
        size = round(mebibytes) * MIB
        history = [(Action.SEGMENT_ALLOC, BASE, size), (Action.ALLOC, BASE, size)]
        loader = {"loader": LoaderBatchSize(SAMPLES, "t.py:7")} if self.divisible else {}
        return trace_of(
            history, device=self.device, versions={"torch": "2.14.1"}, command=("t.py",), **loader
        )


def find(script, mebibytes, allowed=AllowedChanges(), *, policies=False, run_ahead=lambda _: None):  # noqa: B008 - frozen
    seconds = lambda operation: operation.flops / 1e9  # noqa: E731
    planned = PlannedScript(script, seconds, lambda size: size, "a rule", run_ahead=run_ahead)
    return find_plan(planned, mebibytes * MIB + OUTSIDE, allowed, policies=policies)


def proportional(share):
    return PLAIN * (0.4 + 0.6 * share)


def printed(found):
    console = Console(file=io.StringIO(), width=200)
    print_plan(found, console)
    return console.file.getvalue()


def test_a_compiled_script_that_fits_is_run_once():
    script = CompiledScript(proportional)
    found = find(script, 1001)
    assert found.chosen is found.as_written
    assert script.ran == [(1, 1.0)]


def test_the_highest_share_that_fits_is_chosen_where_batches_cannot_be_divided():
    script = CompiledScript(proportional, divisible=False)
    found = find(script, 800)  # 0.6 needs 760
    assert found.chosen.change.plan == {"compilation": {"activation_memory_budget": 0.6}}
    assert found.chosen.needs.bytes <= found.budget
    assert (found.chosen.equality, found.bound) == ("up to rounding", 0.0)
    assert found.undivided == "memfit found no option and no DataLoader that sets the batch size"
    assert found.models == ("Net (optimizer: t:1)",)
    assert script.ran == [(1, 1.0), (1, 0.5), (1, 0.9), (1, 0.7), (1, 0.6)]
    text = printed(found)
    assert "activation_memory_budget 0.6  <- chosen" in text
    assert "torch._functorch.config.activation_memory_budget = 0.6" in text
    assert "other kernels" in text
    assert "takes less than" not in text
    assert json.loads(result_to_json(found))["plan"] == found.chosen.change.plan


def test_micro_batches_are_preferred_if_they_are_faster_and_lower_shares_are_not_compiled_then():
    script = CompiledScript(proportional, slower=0.02)
    found = find(script, 600)
    assert found.chosen.change.micro_batches.count == 2
    assert found.chosen.time == pytest.approx(1.02)
    # Whole batches that keep 0.9 of their activations take as long, so with less kept they take longer.
    assert script.ran == [
        (1, 1.0),
        (1, "eager"),
        (2, "eager"),
        (2, 1.0),
        (1, 0.9),
    ]
    assert found.models == ()


def test_a_share_of_whole_batches_is_chosen_if_it_is_faster_than_micro_batches():
    script = CompiledScript(lambda share: PLAIN if share == 1 else 800)
    found = find(script, 850)
    assert found.chosen.change.plan == {"compilation": {"activation_memory_budget": 0.9}}
    assert found.chosen.time == pytest.approx(1.02)


def test_batches_stay_whole_where_the_eager_step_shows_that_samples_depend_on_each_other():
    script = CompiledScript(proportional, half=feed_forward(blocks=3, samples=64).record())
    found = find(script, 800)
    assert found.undivided == "with half the samples, the step runs other operations"
    assert found.chosen.change.plan == {"compilation": {"activation_memory_budget": 0.6}}
    assert (2, 1.0) not in script.ran


def test_shares_of_divided_batches_are_tried_where_no_division_fits_alone():
    script = CompiledScript(lambda share: 128 * proportional(share))  # one sample still needs 1,000 MiB
    found = find(script, 900)
    assert found.chosen is not None
    assert found.chosen.change.micro_batches.count == SAMPLES
    assert found.chosen.needs.bytes <= found.budget


def test_batches_are_divided_no_further_where_recomputation_takes_less_time():
    script = CompiledScript(proportional, slower=0.2)  # 4 parts: 1.6 times; 2 that keep half: 1.3 times
    found = find(script, 400)
    assert found.chosen.change.micro_batches.count == 2
    assert found.chosen.change.plan["compilation"] == {"activation_memory_budget": 0.6}
    assert max(parts for parts, _ in script.ran) == 2


def test_batches_are_divided_further_where_no_share_fits():
    script = CompiledScript(proportional, slower=0.2)
    found = find(script, 220)  # 2 parts that keep 0.1 need 230
    assert found.chosen.change.micro_batches.count == 4
    assert found.chosen.needs.bytes <= found.budget


def test_a_lower_share_is_not_taken_to_need_less():
    valley = {0.5: 900, 0.2: 870, 0.1: 950, 0.3: 700}
    script = CompiledScript(lambda share: valley.get(share, PLAIN), divisible=False)
    found = find(script, 750)
    assert found.chosen.change.plan == {"compilation": {"activation_memory_budget": 0.3}}


def test_a_share_under_which_compilation_fails_is_dropped_and_counted():
    script = CompiledScript(proportional, divisible=False, broken=lambda share: share == 0.5)
    found = find(script, 530)  # 0.2 needs 520
    assert found.chosen.change.plan == {"compilation": {"activation_memory_budget": 0.2}}
    reason = "With activation_memory_budget 0.5, the script ended with BackendCompilerFailed: no (t.py:5)."
    assert found.dropped == (reason,)
    assert f"1 plan could not be run. {reason}" in printed(found)
    assert json.loads(result_to_json(found))["dropped"] == [reason]


def test_every_block_is_checkpointed_if_no_share_fits():
    script = CompiledScript(lambda _: PLAIN, divisible=False, blocks=300)
    found = find(script, 400)
    assert script.ran[-1] == (1, "blocks")
    assert found.chosen.change.plan == {"checkpointing": {}}
    assert "checkpoint every block  <- chosen" in printed(found)


def test_policies_are_run_beside_the_plan_and_those_that_cannot_be_compiled_are_left_out():
    script = CompiledScript(proportional, divisible=False, blocks=300)
    unseen = lambda change, what: (  # noqa: E731
        replace(script(change, what), operations=None)
        if "every" in change.plan.get("checkpointing", {})
        else script(change, what)
    )
    found = find(unseen, 800, policies=True)
    assert [run.change.plan.keys() for run in found.policies] == [{"checkpointing"}] * 2
    assert all(run.time == 1 and run.compiled for run in found.policies)


def test_what_fits_no_budget_says_what_the_smallest_plan_needs():
    script = CompiledScript(proportional, divisible=False)
    found = find(script, 100)
    assert found.chosen is None
    assert found.smallest.needs.bytes == round(proportional(0.1)) * MIB + OUTSIDE
    assert "None of these plans fits" in found.reason
    assert "NO PLAN FITS" in printed(found)


def test_with_bitwise_the_kernels_of_compiled_code_stay_as_they_are():
    script = CompiledScript(proportional)
    found = find(script, 800, AllowedChanges(rounding=False))
    assert found.chosen is None
    assert "--bitwise permits only settings of the allocator" in found.reason
    assert script.ran == [(1, 1.0)]


def test_shares_that_would_take_too_long_are_not_compiled_once_something_fits():
    unlimited, script = (CompiledScript(proportional, slower=0.2) for _ in range(2))
    assert find(unlimited, 600).chosen.time == pytest.approx(1.14)  # 0.3 of whole batches, after 0.2
    found = find(script, 600, AllowedChanges(slowdown=1.1))
    assert (found.chosen, found.smallest) == (None, None)
    assert found.too_slow.time == pytest.approx(1.2)  # two micro-batches
    assert min(share for parts, share in script.ran if share != "eager") >= 0.4
    assert "NO PLAN FITS   within 1.1 times the time" in printed(found)
    assert "<- too slow" in printed(found)


def test_a_share_that_is_fast_enough_is_found_although_micro_batches_are_not():
    found = find(CompiledScript(proportional, slower=0.2), 700, AllowedChanges(slowdown=1.15))
    assert found.chosen.change.plan == {"compilation": {"activation_memory_budget": 0.5}}
    assert found.too_slow is None


def test_what_runs_ahead_is_asked_for():
    script, asked, ahead = CompiledScript(proportional, slower=0.2), [], []

    def run(change, what):
        asked.append((change, what))
        return script(change, what)

    def run_ahead(wanted):
        ahead.append((len(asked), list(wanted)))

    found = find(run, 400, run_ahead=run_ahead)
    assert found.chosen.change.plan["compilation"] == {"activation_memory_budget": 0.6}
    assert all(each in asked for _, wanted in ahead for each in wanted)
    first, *others = ahead
    assert len(first[1]) == 3  # the first division, and two eager runs
    assert all(asked[count] == wanted[0] for count, wanted in others)
    assert max(len(wanted) for _, wanted in others) == 2


def test_a_share_that_leaves_the_uncertainty_of_the_context_free_is_preferred_to_a_higher_one():
    script = CompiledScript(proportional, divisible=False)
    script.device = replace(DEVICE, context=replace(DEVICE.context, provenance=Provenance.ASSUMED))
    found = find(script, 780)  # 0.6 needs 760, 0.5 needs 700; the context may be 21 MiB larger
    assert found.chosen.change.plan == {"compilation": {"activation_memory_budget": 0.5}}
    assert not found.is_tight


def test_the_highest_share_that_ran_and_fits_is_chosen_if_each_is_tight():
    script = CompiledScript(lambda share: 800 if share < 1 else PLAIN, divisible=False)
    script.device = replace(DEVICE, context=replace(DEVICE.context, provenance=Provenance.ASSUMED))
    found = find(script, 810)
    assert found.is_tight
    assert found.chosen.time == min(run.time for run in found.tried if run.needs.bytes <= found.budget)
    assert (
        found.chosen.change.plan["compilation"]["activation_memory_budget"] > 0.5
    )  # once 0.5 to 0.1 had run
    assert "PLAN FOUND, TIGHT   needs" in printed(found)
