"""How a script for one GPU may train on several: what each rank then holds, and what it sends in a step.

                parameters    gradients    optimizer state    sends, in bytes of all parameters
    DDP         all           all          all                2    all-reduce of gradients
    ZeRO-1      all           all          1/N                3    and broadcast of parameters
    FSDP2       1/N           1/N          1/N                3    two all-gathers and a reduce-scatter

A rank sends (N - 1)/N of these, as in NCCL's rings; with micro-batches, all but the broadcast for each. How
fast links between GPUs are is not in memfit's table of devices. So times leave communication out, and what
sends less is tried first.

Source: NCCL's performance notes (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from memfit.analysis.strategy_comparison import SHARDINGS, sharding_settings
from memfit.planning.strategy_and_allocator_changes import strategy_change
from memfit.records import Change, ModuleCall, PlanRun, ScriptPlan, ShardingCalls, StepOperations, Term
from memfit.records.own_sharding import call_options_in_words, offloads_shards

_DDP, _ZERO1, _FSDP2 = (
    strategy_change("sharding", sharding_settings(mode), name) for name, mode in SHARDINGS.items()
)
OFFLOADED_SHARDS = strategy_change(
    "sharding", sharding_settings("fsdp2") | {"offload": True}, "FSDP2 with offload"
)
UNSHARDED = _DDP
"""What a script for one GPU does on several as long as it fits."""
_SAME_SUMS, _OTHER_SUMS = (_DDP, _ZERO1), (_FSDP2,)
"""Shardings under which each gradient is summed over the ranks as with DDP, and others."""


def shardings_to_try(*, rounding: bool) -> tuple[Change, ...]:
    """Return the shardings that keep everything on the GPUs, those first that move least.

    Args:
        rounding: whether gradients may be summed in another order than with DDP.
    """
    return _SAME_SUMS + _OTHER_SUMS * rounding


def own_sharding_changes(calls: Iterable[ShardingCalls], *, offloads: bool) -> Iterator[Change]:
    """Yield the options of a script's own sharding that may lower its peak.

    Args:
        calls: how the script shards itself.
        offloads: whether those under which shards wait on the host are wanted, or the others.
    """
    for own in calls:
        for options in own.options:
            if offloads_shards(options) == offloads:
                yield Change(own_sharding={own.call: options}, words=(call_options_in_words(options),))


def bytes_sent_per_step(run: PlanRun, terms: tuple[Term, ...], ranks: int) -> int:
    """Return about how many bytes a rank sends to others in a step.

    Args:
        run: a plan that shards the script.
        terms: of a run with all parameters on the GPU.
        ranks: of the job.
    """
    mode, parts = run.change.plan["sharding"]["mode"], run.change.parts
    times = {"ddp": 2 * parts, "zero1": 2 * parts + 1, "fsdp2": 3 * parts}[mode]
    return times * _parameters(terms) * (ranks - 1) // ranks


def bytes_sent_before_and_under(plan: ScriptPlan, ranks: int) -> tuple[int, int] | None:
    """Return that for a script before a plan and under it; None if the plan does not shard the script."""
    if plan.chosen is None or "sharding" not in plan.chosen.change.plan:
        return None
    terms = plan.as_written.terms
    before, now = (bytes_sent_per_step(run, terms, ranks) for run in (plan.as_written, plan.chosen))
    return before, now


def _parameters(terms: tuple[Term, ...]) -> int:
    return sum(term.figure.bytes for term in terms if term.name == "parameters")


def with_unsharded_module_names(plain: StepOperations, sharded: StepOperations) -> StepOperations:
    """Return the operations of a sharded model, with its modules named as before.

    DistributedDataParallel becomes the parent of the model that it wraps: ``module.blocks.0``.
    """
    if not plain.calls or not sharded.calls:
        return sharded
    own, name = sharded.calls[0].module, plain.calls[0].module
    if own == name:
        return sharded

    def renamed(call: ModuleCall) -> ModuleCall:
        inner = call.module.removeprefix(own).removeprefix(".")
        return replace(call, module=".".join(filter(None, (name, inner))))

    return replace(sharded, calls=tuple(map(renamed, sharded.calls)))
