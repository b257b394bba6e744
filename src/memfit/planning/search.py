"""Find the fastest plan for a script under a budget: solve, run the plan on the ghost, tighten, solve again.

    plain run ──> CheckpointChooser ──> choice ──> run on the ghost ──> fits? ──> plan
                       ^                                    │
                       └── budget of the model, corrected <─┘

The model predicts allocated bytes of one step; what counts is what the process needs. Each run shows by how
much they differ, and the next choice is made with that. No plan is returned that has not run.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from memfit.analysis.advice_candidates import RunFacts
from memfit.analysis.needed_memory import ReplayedRun
from memfit.analysis.script_change import (
    PlannedRegion,
    PlannedStrategy,
    RunTrial,
    ScriptChange,
    TrialResult,
    why_it_failed,
)
from memfit.analysis.summary import summarize
from memfit.errors import TargetError
from memfit.planning.choose import CheckpointChoice, CheckpointChooser
from memfit.planning.seconds import step_seconds
from memfit.records import Figure, Operation, PlanRun, ScriptEnd, ScriptPlan, StepOperations, worst

_UNRECORDED = (
    "memfit saw no training step to plan: no optimizer stepped twice, or the script calls no module of its "
    "model."
)
_MOST_RUNS = 8
"""Plans that run on the ghost at most."""
_WORTH = 0.003
"""Share of a step's time that another plan must be able to save to be looked for."""


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


def find_plan(script: PlannedScript, budget: int, *, allocator: bool = True) -> ScriptPlan:
    """Return the fastest plan of a script under a budget.

    Args:
        script: the script.
        budget: bytes of the process, the CUDA context included.
        allocator: whether a plan may set ``PYTORCH_ALLOC_CONF``.

    Raises:
        TargetError: the script as written cannot be run.
    """
    plain = script.run(ScriptChange(operations=True), "as written, operation by operation")
    if isinstance(plain, ScriptEnd):
        raise TargetError(f"memfit cannot plan for the script: {why_it_failed(plain)}")
    return _PlanSearch(script, plain, budget, allocator=allocator).plan()


class _PlanSearch:
    def __init__(self, script: PlannedScript, plain: TrialResult, budget: int, *, allocator: bool) -> None:
        self._script, self._plain, self._budget = script, plain, budget
        self._allocator = allocator
        self._optimizer = plain.operations.optimizer if plain.operations is not None else None
        self._tried: list[PlanRun] = []
        self._models: tuple[str, ...] = ()
        self._refusal = ""
        self._step = 0.0  # seconds of a step as written

    def plan(self) -> ScriptPlan:
        as_written = self._ran(self._plain, {}, 1.0)
        if as_written.needs.bytes <= self._budget:
            return self._answer(as_written, chosen=as_written)
        tuned = self._ran(self._plain, {}, 1.0, tune=True)
        if tuned.conf:
            self._tried.append(tuned)
        if tuned.needs.bytes <= self._budget:
            return self._answer(as_written, chosen=tuned)
        if self._plain.operations is None:
            return self._answer(as_written, smallest=tuned, reason=_UNRECORDED)
        self._step = step_seconds(self._plain.operations, self._script.seconds)
        best = self._best_choice(self._plain.operations, tuned)
        if best is None and not self._refusal:
            best = self._best_choice(self._plain.operations, tuned, offload=True)
        if self._refusal:
            return self._answer(as_written, reason=self._refusal)
        if best is None:
            smallest = min([*self._tried, tuned], key=lambda each: each.needs.bytes)
            return self._answer(as_written, smallest=smallest, reason=_too_small(smallest))
        choice, run = best
        return self._answer(as_written, chosen=run, bound=1 + choice.bound / self._step)

    def _best_choice(
        self, operations: StepOperations, before: PlanRun, *, offload: bool = False
    ) -> tuple[CheckpointChoice, PlanRun] | None:
        """Return the fastest choice that fits, with or without offload of inputs; None if none does."""
        copy = self._script.copy if offload else None
        chooser = CheckpointChooser(operations, self._script.seconds, copy)
        best: tuple[CheckpointChoice, PlanRun] | None = None
        over: CheckpointChoice | None = None
        """The choice with the smallest predicted peak of those that did not fit."""
        seen: set[tuple[int, float]] = set()
        """By prediction: of identical modules, it does not matter which are recomputed."""
        besides = before.needs.bytes - chooser.plain_peak
        while len(seen) < _MOST_RUNS:
            target = self._budget - besides
            if over is not None and target >= over.peak:
                fits = best[0].peak if best is not None else over.peak - self._budget // 50
                target = (fits + over.peak) // 2
            choice = chooser.choose(target) or chooser.smallest
            regions, prediction = _regions(choice), (choice.peak, choice.seconds)
            if not regions or prediction in seen:
                break
            seen.add(prediction)
            done = self._try(regions, 1 + choice.seconds / self._step, offload=offload)
            if done is None:
                return None
            besides = done.needs.bytes - choice.peak
            if done.needs.bytes > self._budget:
                over = choice if over is None or choice.peak < over.peak else over
            elif best is None or choice.seconds < best[0].seconds:
                best = choice, done
            fastest = over.seconds if over is not None else 0.0
            if best is not None and best[0].seconds - fastest <= _WORTH * self._step:
                break
        return best

    def _try(self, regions: tuple[PlannedRegion, ...], time: float, *, offload: bool) -> PlanRun | None:
        """Run a plan; None if the script or a model refuses it."""
        settings: dict[str, Any] = {
            "checkpointing": {"regions": [_plain_region(region) for region in regions]}
        }
        strategies = [PlannedStrategy("checkpointing", (("regions", regions),))]
        count = sum(len(region.modules) for region in regions)
        what = f"{count} module{'s' * (count != 1)} checkpointed"
        if offload:
            settings["offload"] = {"what": "inputs"}
            strategies.append(PlannedStrategy("offload", (("what", "inputs"),)))
            what += ", inputs offloaded"
        what += f" (plan {len(self._tried) + 1})"
        run = self._script.run_late if offload else self._script.run
        result = run(ScriptChange(tuple(strategies), self._optimizer), what)
        if isinstance(result, ScriptEnd):
            self._refusal = f"With {what}, {why_it_failed(result)}"
            return None
        self._models = result.models
        done = self._ran(result, settings, time, tune=True)
        self._tried.append(done)
        return done

    def _ran(
        self, result: TrialResult, settings: dict[str, Any], time: float, *, tune: bool = False
    ) -> PlanRun:
        """Return what a run needs; with ``tune``, with expandable segments if it fits only with them."""
        found = summarize(result.trace)
        run = ReplayedRun.of(result.trace, found)
        needs = _process(run)
        conf = (
            RunFacts.of(result.trace, found).conf
            if tune and self._allocator and needs.bytes > self._budget
            else ""
        )
        if conf and (less := _process(replace(run, conf=conf))).bytes < needs.bytes:
            return PlanRun(settings, less, time, found.peak_place, conf)
        return PlanRun(settings, needs, time, found.peak_place)

    def _answer(
        self,
        as_written: PlanRun,
        *,
        chosen: PlanRun | None = None,
        smallest: PlanRun | None = None,
        bound: float = 1.0,
        reason: str = "",
    ) -> ScriptPlan:
        trace = self._plain.trace
        return ScriptPlan(
            device=trace.device,
            budget=self._budget,
            as_written=as_written,
            chosen=chosen,
            smallest=smallest,
            bound=bound,
            rule=self._script.rule,
            tried=tuple(self._tried),
            models=self._models,
            optimizer=self._optimizer,
            command=trace.command,
            versions=trace.versions,
            reason=reason,
        )


def _regions(choice: CheckpointChoice) -> tuple[PlannedRegion, ...]:
    """Return the modules that are checkpointed alike together."""
    modules: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for module, save_ops in choice.save_ops.items():
        modules[save_ops].append(module)
    return tuple(sorted(PlannedRegion(tuple(names), ops) for ops, names in modules.items()))


def _too_small(smallest: PlanRun) -> str:
    place = smallest.place
    where = " of ".join(filter(None, (f"the {place.phase}", place.module)))
    return (
        "memfit recomputes activations, and offloads the inputs of what it recomputes. No such plan is "
        "enough:"
        f" at the smallest peak, in {where}, other memory is left."
    )


def _plain_region(region: PlannedRegion) -> dict[str, list[str]]:
    saved = {"save_ops": list(region.save_ops)} if region.save_ops else {}
    return {"modules": list(region.modules)} | saved


def _process(run: ReplayedRun) -> Figure:
    reserved, outside = run.smallest(), run.trace.device.outside
    return Figure(reserved.bytes + outside.bytes, worst(reserved.provenance, outside.provenance))
