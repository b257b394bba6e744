"""Run plans on the ghost: what each needs, and what holds the memory at its peak."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.analysis.advice_candidates import RunFacts
from memfit.analysis.needed_memory import ReplayedRun, process_bytes
from memfit.analysis.script_change import (
    PlannedRegion,
    PlannedStrategy,
    RunTrial,
    ScriptChange,
    TrialResult,
)
from memfit.analysis.summary import summarize
from memfit.planning.choose import CheckpointChoice
from memfit.records import DividedBatches, Figure, Operation, PlanRun, ScriptEnd, Trace


@dataclass(frozen=True, slots=True)
class PlannedScript:
    """A script to be planned for, and what is known about the card."""

    run: RunTrial
    """Runs it under a change, with unlimited memory."""
    run_late: RunTrial
    """The same, with GPU work on side streams that finishes as late as its order allows."""
    seconds: Callable[[Operation], float]
    """How long an operation takes."""
    copy: Callable[[int], float]
    """How long it takes to copy bytes to the host and back."""
    rule: str
    """What the times are based on."""


@dataclass(frozen=True, slots=True)
class PlanChange:
    """A change to the script, and the same as settings of a ``memfit.Plan``."""

    change: ScriptChange = ScriptChange()  # noqa: RUF009 - frozen
    settings: Mapping[str, Any] = field(default_factory=dict)
    divided: DividedBatches | None = None
    late: bool = False
    """Whether work on side streams counts, so that the run must finish it as late as it can be."""
    words: tuple[str, ...] = ()
    """What it does, for the user who waits."""

    @property
    def parts(self) -> int:
        """Micro-batches of a batch."""
        return self.divided.count if self.divided is not None else 1

    def __or__(self, other: "PlanChange") -> "PlanChange":
        """Return both changes together."""
        return PlanChange(
            self.change | other.change,
            {**self.settings, **other.settings},
            other.divided or self.divided,
            self.late or other.late,
            self.words + other.words,
        )


def recomputation(choice: CheckpointChoice, optimizer: int | None, *, offload: bool) -> PlanChange:
    """Return the change that carries out a choice.

    Args:
        choice: what to recompute.
        optimizer: which optimizer of the script has the model's parameters.
        offload: whether the inputs of what is recomputed wait on the host.
    """
    settings: dict[str, Any] = {"checkpointing": {"regions": [_plain(region) for region in choice.regions]}}
    strategies = [PlannedStrategy("checkpointing", (("regions", choice.regions),))]
    count = sum(len(region.modules) for region in choice.regions)
    words: tuple[str, ...] = (f"{count} module{'s' * (count != 1)} checkpointed",)
    if offload:
        settings["offload"] = {"what": "inputs"}
        strategies.append(PlannedStrategy("offload", (("what", "inputs"),)))
        words += ("inputs offloaded",)
    return PlanChange(ScriptChange(tuple(strategies), optimizer), settings, late=offload, words=words)


class PlanRuns:
    """The runs of a search, in order.

    Args:
        script: the script.
        budget: bytes of the process.
        tune: whether runs that do not fit may get expandable segments.
        compiled: whether ``torch.compile`` compiles the script's code.
    """

    def __init__(self, script: PlannedScript, budget: int, *, tune: bool, compiled: bool = False) -> None:
        self._script, self._budget, self._tune, self._compiled = script, budget, tune, compiled
        self.tried: list[PlanRun] = []

    def fits(self, run: PlanRun) -> bool:
        """Return whether a run fits the budget."""
        return run.needs.bytes <= self._budget

    def make(
        self, plan: PlanChange, time: float | Callable[[TrialResult], float], *, operations: bool = False
    ) -> tuple[TrialResult, PlanRun] | ScriptEnd:
        """Run a plan.

        Args:
            plan: the plan.
            time: of a step, relative to the script as written, or what computes it from the result.
            operations: whether the operations of a step are recorded.
        """
        run = self._script.run_late if plan.late else self._script.run
        what = f"{', '.join(plan.words)} (plan {len(self.tried) + 1})"
        result = run(plan.change | ScriptChange(operations=operations), what)
        if isinstance(result, ScriptEnd):
            return result
        done = self.needs(result.trace, plan, time(result) if callable(time) else time)
        self.tried.append(done)
        return result, done

    def needs(self, trace: Trace, plan: PlanChange, time: float, *, tune: bool = True) -> PlanRun:
        """Return what a run needs; with ``tune``, with expandable segments if it fits only with them."""
        found = summarize(trace)
        run = ReplayedRun.of(trace, found)
        needs, conf = _process(run), ""
        if tune and self._tune and needs.bytes > self._budget:
            conf = RunFacts.of(trace, found).conf
        if conf and (less := _process(replace(run, conf=conf))).bytes < needs.bytes:
            needs = less
        else:
            conf = ""
        return PlanRun(
            plan.settings,
            needs,
            time,
            found.peak_place,
            conf,
            plan.divided,
            plan.change.fused,
            tuple(found.terms),
            self._compiled,
            found.peak_allocated,
        )


def _plain(region: PlannedRegion) -> dict[str, list[str]]:
    given = {"modules": region.modules, "save_ops": region.save_ops, "split_at": region.split_at}
    return {name: list(values) for name, values in given.items() if values}


def _process(run: ReplayedRun) -> Figure:
    return process_bytes(run.smallest(), run.trace.device)
