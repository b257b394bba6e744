"""Divide a script's batches into micro-batches; each update sums the gradients of all parts of a batch."""

from memfit.analysis.advice_candidates import AdviceCandidate, RunFacts
from memfit.analysis.script_change import ScriptChange
from memfit.planning.plan_runs import PlanChange
from memfit.records import DividedBatches


def divisions(facts: RunFacts, *, draws: bool) -> list[PlanChange]:
    """Return the ways to divide a script's batches into equal parts, largest first.

    Args:
        facts: what sets the batch size.
        draws: whether a step draws random numbers.
    """
    whole = facts.batch_size
    return [
        _division(whole // one.batch_size, one, draws=draws)
        for one in facts.smaller_batches
        if one.batch_size and whole % one.batch_size == 0
    ]


def why_indivisible(facts: RunFacts) -> str:
    """Return why a script's batches cannot be divided, as a clause."""
    if facts.batch_size == 1:
        return "a batch has one sample"
    return "memfit found no option and no DataLoader that sets the batch size"


def _division(count: int, smaller: AdviceCandidate, *, draws: bool) -> PlanChange:
    change, own = smaller.change, smaller.accumulates
    divided = DividedBatches(
        count,
        smaller.batch_size,
        smaller.how,
        smaller.where,
        change.arguments,
        change.loader,
        draws=draws,
        by_option=own,
    )
    return PlanChange(
        change if own else change | ScriptChange(micro_batches=count),
        {} if own else {"accumulation": {"parts_per_batch": count}},  # the script's own options, or Engine's
        divided,
        words=(f"{count} micro-batches",),
    )
