"""Plans for several GPUs, with runs that are computed instead of made."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from memfit.analysis.trial_result import TrialResult
from memfit.errors import TargetError, UsageError
from memfit.planning.find_plan import find_plan
from memfit.planning.run_changes_on_ghost import PlannedScript
from memfit.planning.shardings import bytes_sent_per_step, with_unsharded_module_names
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import Change, DividedBatches, Figure, Provenance, ScriptEnd, ShardingCalls, Term
from memfit.report.terminal.script_plan import print_plan
from support.planned_script import MIB, OUTSIDE, Script, copy, needing, timed, work

RANKS = 4
NEEDS = {"ddp": 1.2, "zero1": 1.1, "fsdp2": 1.0, "offloaded": 0.9}
"""Of the whole script: what it needs with each sharding."""
MUCH = {mode: share + 0.5 for mode, share in NEEDS.items()}
"""The same, where half of what the whole script needs is held in any case."""
NCCL = Figure(10 * MIB, Provenance.ASSUMED)


class ShardedScript(Script):
    """A script for one GPU. Of its model, recomputation saves as much with a sharding as without.

    Args:
        needs: by sharding, how much more than the plain script it needs, as a share; None if it is refused.
    """

    def __init__(self, needs=None):
        super().__init__(blocks=8)
        self.shares = NEEDS | (needs or {})
        self.ran = []

    def __call__(self, change, what):
        found = change.strategies
        if "sharding" not in found:
            return super().__call__(change, what)
        mode = "offloaded" if found["sharding"].get("offload") else found["sharding"]["mode"]
        self.ran.append((mode, "checkpointing" in found))
        if self.shares[mode] is None:
            return ScriptEnd("refused", 0, f"no {mode}")
        rest = {name: settings for name, settings in found.items() if name != "sharding"}
        if not rest:
            wrapped = tuple(
                replace(call, module=f"module.{call.module}".rstrip(".")) for call in self.step.calls
            )
            return TrialResult(
                needing(round(self.shares[mode] * self.plain)),
                ("Net (optimizer: t:1)",),
                operations=replace(self.step, calls=wrapped),
            )
        inside = super().__call__(replace(change, plan=rest), what)
        if isinstance(inside, ScriptEnd):
            return inside
        size = inside.trace.events.size.max() // MIB + round((self.shares[mode] - 1) * self.plain)
        return replace(inside, trace=needing(int(size)))


def planned(script, share, allowed=AllowedChanges(), ranks=RANKS):  # noqa: B008 - frozen
    budget = int(share * script.plain) * MIB + OUTSIDE
    return find_plan(PlannedScript(script, work, copy, "a rule", ranks), budget, allowed)


def printed(found):
    text = io.StringIO()
    print_plan(replace(found, nproc=RANKS), Console(file=text, width=200, highlight=False, markup=False))
    return text.getvalue()


@pytest.mark.parametrize(("share", "mode"), [(1.25, "ddp"), (1.15, "zero1"), (1.05, "fsdp2")])
def test_the_sharding_that_sends_least_is_taken_if_it_fits(share, mode):
    script = ShardedScript()
    found = planned(script, share)
    assert found.chosen.change.plan == {"sharding": {"mode": mode, "split_batch": True}}
    assert (found.chosen.time, found.bound) == (1.0, 1.0)
    assert found.as_written.change.plan == {"sharding": {"mode": "ddp", "split_batch": True}}
    assert [ran for ran, _ in script.ran] == ["ddp", "zero1", "fsdp2"][: list(NEEDS).index(mode) + 1]
    assert found.models == ("Net (optimizer: t:1)",)
    assert f"memfit.Sharding(mode='{mode}', split_batch=True)" in printed(found)
    assert ("optimizer = memfit.Sharding" in printed(found)) == (mode == "zero1")


def test_what_is_recomputed_is_named_as_in_the_script():
    found = planned(ShardedScript(), 0.8)
    assert found.chosen.change.plan["sharding"] == {"mode": "fsdp2", "split_batch": True}
    names = [
        name for each in found.chosen.change.plan["checkpointing"]["regions"] for name in each["modules"]
    ]
    assert names
    assert not any(name.startswith("module") for name in names)
    assert found.chosen.needs.bytes <= found.budget
    assert found.chosen.equality == "up to rounding"


def test_shardings_take_what_their_steps_take_beside_that_of_plain_data_parallelism():
    script, products = ShardedScript(), {"ddp": 40, "zero1": 44, "fsdp2": 60}

    def run(change, what):
        result = script(change, what)
        count = products[change.plan["sharding"]["mode"]] if change.strategies else 100
        return replace(result, trace=timed(result.trace, count))

    found = find_plan(
        PlannedScript(run, work, copy, "a rule", RANKS), int(1.05 * script.plain) * MIB + OUTSIDE
    )
    assert [round(each.time, 6) for each in (found.as_written, *found.tried)] == [1.0, 1.1, 1.5]
    assert "Time: 1.500 times DDP" in printed(found)
    assert "rings of NCCL)." in printed(found)
    assert found.seconds == pytest.approx(1.5 * found.step_time.seconds)


def test_shards_are_offloaded_only_if_nothing_else_is_enough():
    script = ShardedScript(MUCH | {"offloaded": 0.4})
    found = planned(script, 0.45)
    assert found.chosen.change.plan == {"sharding": {"mode": "fsdp2", "split_batch": True, "offload": True}}
    assert script.ran.index(("offloaded", False)) > script.ran.index(("fsdp2", False))
    assert "FSDP2 with offload" in printed(found)


def test_where_nothing_fits_the_smallest_that_ran_is_reported():
    found = planned(ShardedScript(MUCH), 0.4)
    assert found.chosen is None
    assert found.smallest.needs.bytes == min(run.needs.bytes for run in found.tried) > found.budget
    assert "memfit shards the model, recomputes activations" in found.reason
    assert printed(found).startswith("NO PLAN FITS   the smallest needs ")
    assert "on each of 4 GPUs; with DDP " in printed(found)


def test_where_every_bit_counts_gradients_are_summed_as_with_ddp():
    script = ShardedScript()
    found = planned(script, 0.9, AllowedChanges(rounding=False))
    assert {mode for mode, _ in script.ran} == {"ddp", "zero1"}
    assert found.chosen.change.plan["sharding"] == {"mode": "zero1", "split_batch": True}
    assert found.chosen.equality == "bit for bit"


def test_a_sharding_that_does_not_suit_the_script_is_named_and_left_out():
    found = planned(ShardedScript({"ddp": None}), 1.15)
    assert (
        found.as_written.change.plan
        == found.chosen.change.plan
        == {"sharding": {"mode": "zero1", "split_batch": True}}
    )
    assert found.dropped == ("With DDP, no ddp.",)


def test_a_script_that_no_sharding_suits_cannot_be_planned():
    with pytest.raises(TargetError, match=r"cannot plan for 4 GPUs. With DDP, no ddp."):
        planned(ShardedScript(dict.fromkeys(NEEDS)), 1.0)


def test_a_compiled_script_for_one_gpu_is_refused_by_name():
    script = ShardedScript()
    script.step = replace(script.step, compiled=True)
    with pytest.raises(UsageError, match="compiled script on several GPUs"):
        planned(script, 1.0)


def test_a_plan_must_fit_every_rank():
    """Another rank needs more under plans."""

    class Distributed(Script):
        def __call__(self, change, what):
            first = super().__call__(change, what)
            device = replace(first.trace.device, nccl=NCCL)
            first = replace(first, trace=replace(first.trace, device=device))
            more = first.trace.events.size.max() // MIB + 150 * bool(change.strategies)
            other = replace(needing(int(more)), device=device)
            return replace(first, others=(TrialResult(other),))

    script = Distributed()
    found = planned(script, 0.7)
    assert len(script.changes) > 1
    assert found.tried[0].needs.bytes > found.budget >= found.chosen.needs.bytes
    alone = planned(Script(), 0.7, ranks=1)
    assert found.chosen.time > alone.chosen.time
    assert found.as_written.change.plan == {}


def test_names_stay_where_nothing_wraps_the_model():
    script = Script()
    assert with_unsharded_module_names(script.step, script.step) is script.step


@pytest.mark.parametrize(("mode", "whole", "in_two"), [("ddp", 2, 4), ("zero1", 3, 5), ("fsdp2", 3, 6)])
def test_what_a_rank_sends_and_copies_follows_from_the_bytes_of_parameters(mode, whole, in_two):
    terms = Term("parameters", Figure(800, Provenance.EXACT)), Term("inputs", Figure(7, Provenance.EXACT))
    run = replace(
        planned(ShardedScript(), 1.25).chosen,
        change=Change({"sharding": {"mode": mode, "split_batch": True}}),
    )
    assert bytes_sent_per_step(run, terms, 4) == whole * 600
    halves = replace(run.change, micro_batches=DividedBatches(2, 4, "", ""))
    assert bytes_sent_per_step(replace(run, change=halves), terms, 4) == in_two * 600


FSDP2 = ShardingCalls(
    "FSDP2",
    "fully_shard",
    ("t.py:8",),
    ({"reshard_after_forward": True}, {"offload_policy": "CPUOffloadPolicy()"}),
    ({"reshard_after_forward": False},),
)


class SelfShardedScript(Script):
    """A script that calls ``fully_shard``.

    Args:
        needs: by argument, or ``written``, how much more than the plain script it needs, as a share; None if
            it fails with an option.
    """

    def __init__(self, **needs):
        super().__init__(blocks=8)
        self.shares = {"written": 1.0, "reshard_after_forward": 1.0, "offload_policy": 1.0} | needs
        self.ran = []

    def __call__(self, change, what):
        (name,) = change.own_sharding.get("fully_shard", ["written"])
        self.ran.append((name, "checkpointing" in change.plan))
        if self.shares[name] is None:
            return ScriptEnd("exception", 1, f"no {name}")
        inside = super().__call__(replace(change, own_sharding={}), what)
        if isinstance(inside, ScriptEnd):
            return inside
        trace = needing(
            int(inside.trace.events.size.max() // MIB + round((self.shares[name] - 1) * self.plain))
        )
        trace = replace(trace, device=replace(trace.device, nccl=NCCL))
        return replace(inside, trace=trace, sharding_calls=(FSDP2,))


def test_an_option_of_the_scripts_own_sharding_is_taken_if_it_fits():
    script = SelfShardedScript(reshard_after_forward=0.8)
    found = planned(script, 0.9)
    assert found.chosen.change == Change(own_sharding={"fully_shard": {"reshard_after_forward": True}})
    assert (found.chosen.time, found.chosen.equality) == (1.0, "bit for bit")
    assert script.ran == [("written", False), ("reshard_after_forward", False)]
    text = printed(replace(found, distributed=True))
    assert "reshard_after_forward=True  <- chosen" in text
    assert "FSDP2: pass reshard_after_forward=True in each call of fully_shard: t.py:8\n" in text
    assert "memfit train --plan" in text


def test_what_is_recomputed_is_added_to_the_option_that_needs_least():
    found = planned(SelfShardedScript(reshard_after_forward=0.95), 0.8)
    assert found.chosen.change.own_sharding == {"fully_shard": {"reshard_after_forward": True}}
    assert "checkpointing" in found.chosen.change.plan
    without = planned(SelfShardedScript(reshard_after_forward=1.05), 0.8)
    assert without.chosen.change.own_sharding == {}


def test_shards_of_the_script_are_offloaded_only_if_nothing_else_is_enough():
    script = SelfShardedScript(written=1.5, reshard_after_forward=1.5, offload_policy=0.4)
    found = planned(script, 0.45)
    assert found.chosen.change == Change(
        own_sharding={"fully_shard": {"offload_policy": "CPUOffloadPolicy()"}}
    )
    assert found.chosen.equality == "up to rounding"
    assert found.floor is None
    bitwise = planned(script, 0.45, AllowedChanges(rounding=False))
    assert bitwise.chosen is None
    assert not any("offload_policy" in str(run.change.own_sharding) for run in bitwise.tried)


def test_an_option_with_which_the_script_fails_is_named_and_left_out():
    found = planned(SelfShardedScript(reshard_after_forward=None), 0.8)
    assert found.dropped == (
        "With reshard_after_forward=True, the script ended with no reshard_after_forward.",
    )
    assert found.chosen.change.own_sharding == {}
