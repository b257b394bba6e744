"""How a script's batches can be divided into micro-batches, of which each update sums the gradients."""

from dataclasses import dataclass
from typing import Any

from memfit.analysis.advice_candidates import AdviceCandidate, RunFacts
from memfit.analysis.script_change import ScriptChange
from memfit.records import DividedBatches


@dataclass(frozen=True, slots=True)
class Division:
    """Batches divided into so many micro-batches."""

    micro_batches: DividedBatches
    change: ScriptChange

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a ``memfit.Plan``, for ``memfit.Engine``; none if the script's options do it."""
        if self.micro_batches.by_option:
            return {}
        return {"accumulation": {"parts_per_batch": self.micro_batches.count}}


def divisions(facts: RunFacts) -> list[Division]:
    """Return the ways to divide a script's batches into equal parts, largest first."""
    whole = facts.batch_size
    return [
        _division(whole // one.batch_size, one)
        for one in facts.smaller_batches
        if one.batch_size and whole % one.batch_size == 0
    ]


def why_indivisible(facts: RunFacts) -> str:
    """Return why a script's batches cannot be divided, as a clause."""
    if facts.batch_size == 1:
        return "a batch has one sample"
    return "memfit found no option and no DataLoader that sets the batch size"


def _division(count: int, smaller: AdviceCandidate) -> Division:
    change = smaller.change
    micro_batches = DividedBatches(
        count,
        smaller.batch_size,
        smaller.how,
        smaller.where,
        change.arguments,
        change.loader,
        by_option=smaller.accumulates,
    )
    return Division(
        micro_batches, change if smaller.accumulates else change | ScriptChange(micro_batches=count)
    )
