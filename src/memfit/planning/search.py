"""Find the fastest plan for a script under a budget: solve, run the plan on the ghost, correct, solve again.

    script as written ──> batches divided in 2 ──> in 4 ──> ...     each a base; made while it may pay
           │                      │                  │
        choices of what to recompute, each base's with its own Bracket
           └──────── fastest ─────┴──────────────────┘
                        │
               run on the ghost ──> fits? ──> plan
                        └── the base's model is corrected <──┘

A model predicts allocated bytes of one step; what counts is what the process needs. Each run shows by how
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
from memfit.planning.bracket import WORTH, Bracket
from memfit.planning.choose import CheckpointChoice, CheckpointChooser
from memfit.planning.divided_batches import Division, divisions, why_indivisible
from memfit.planning.sample_independence import why_dependent
from memfit.planning.seconds import step_seconds
from memfit.records import (
    DividedBatches,
    Figure,
    Operation,
    Phase,
    PlanRun,
    ScriptEnd,
    ScriptPlan,
    StepOperations,
    worst,
)

_UNRECORDED = (
    "memfit saw no training step to plan: no optimizer stepped twice, or the script calls no module of its "
    "model."
)
_MOST_RUNS = 10
"""Plans that run on the ghost at most."""


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
class Allowed:
    """What a plan may change."""

    allocator: bool = True
    """``PYTORCH_ALLOC_CONF``."""
    rounding: bool = True
    """The order in which sums are taken: batches are divided, and optimizers fused."""


def find_plan(script: PlannedScript, budget: int, allowed: Allowed = Allowed()) -> ScriptPlan:
    """Return the fastest plan of a script under a budget.

    Args:
        script: the script.
        budget: bytes of the process, the CUDA context included.
        allowed: what the plan may change.

    Raises:
        TargetError: the script as written cannot be run.
    """
    plain = script.run(ScriptChange(operations=True), "as written, operation by operation")
    if isinstance(plain, ScriptEnd):
        raise TargetError(f"memfit cannot plan for the script: {why_it_failed(plain)}")
    return _PlanSearch(script, plain, budget, allowed).plan()


@dataclass(frozen=True, slots=True)
class _Base:
    """The script with batches of one size; what to recompute in it is still to be chosen."""

    change: ScriptChange
    micro_batches: DividedBatches | None
    operations: StepOperations
    time: float
    """Of a step, relative to the script as written."""
    run: PlanRun
    """With nothing recomputed."""
    bracket: Bracket
    offload: bool = False
    """Whether the inputs of recomputed modules wait on the host."""

    @property
    def parts(self) -> int:
        """Micro-batches of a batch."""
        return self.micro_batches.count if self.micro_batches is not None else 1


class _PlanSearch:
    def __init__(self, script: PlannedScript, plain: TrialResult, budget: int, allowed: Allowed) -> None:
        self._script, self._plain, self._budget = script, plain, budget
        self._allowed = allowed
        self._optimizer = plain.operations.optimizer if plain.operations is not None else None
        self._tried: list[PlanRun] = []
        self._models: tuple[str, ...] = ()
        self._refusal = ""  # why nothing can be recomputed
        self._undivided = ""  # why batches are not divided, or no further
        self._step = 0.0  # seconds of a step as written
        self._divisions: list[Division] = []

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
        bases = [self._first_base(tuned, self._plain.operations)]
        self._look_for_divisions()
        chosen = self._search(bases)
        if chosen is None and not self._refusal:
            bases = [self._offloading(base) for base in bases]
            chosen = self._search(bases)
        if chosen is None:
            smallest = min([*self._tried, tuned], key=lambda each: each.needs.bytes)
            return self._answer(as_written, smallest=smallest, reason=self._refusal or _too_small(smallest))
        bound = min(base.time + base.parts * self._least(base) / self._step for base in bases)
        return self._answer(as_written, chosen=chosen, bound=min(bound, chosen.time))

    def _least(self, base: _Base) -> float:
        """Return a bound of the seconds that what fits adds to a base."""
        return 0.0 if base.run.needs.bytes <= self._budget else base.bracket.bound

    def _search(self, bases: list[_Base]) -> PlanRun | None:
        """Return the fastest plan that fits, if one does; bases are added while they may pay."""
        while True:
            fitting = [run for base in bases if (run := self._best(base)) is not None]
            best = min(fitting, key=lambda run: run.time, default=None)
            proposals = [] if self._refusal else list(map(self._proposal, bases))
            found = [each for each in proposals if each is not None]
            likely = min(
                (each for each in found if each[0].bracket.needs(each[1]) <= self._budget),
                key=lambda each: self._time(*each),
                default=None,
            )
            fastest = min(
                best.time if best is not None else float("inf"),
                self._time(*likely) if likely is not None else float("inf"),
            )
            if self._divisions and bases[-1].time < fastest - WORTH:
                bases.extend(self._divide(bases[-1]))
                continue
            if len(self._tried) >= _MOST_RUNS:
                return best
            if likely is not None and (best is None or self._time(*likely) < best.time - WORTH):
                self._try(*likely)
            elif best is not None or not found:
                return best
            else:
                self._try(*min(found, key=lambda each: each[0].bracket.needs(each[1])))

    def _best(self, base: _Base) -> PlanRun | None:
        """Return the fastest run of a base that fits."""
        if base.run.needs.bytes <= self._budget:
            return base.run
        return base.bracket.best[1] if base.bracket.best is not None else None

    def _proposal(self, base: _Base) -> tuple[_Base, CheckpointChoice] | None:
        choice = None if base.run.needs.bytes <= self._budget else base.bracket.next()
        return None if choice is None else (base, choice)

    def _time(self, base: _Base, choice: CheckpointChoice) -> float:
        return base.time + base.parts * choice.seconds / self._step

    # ---- bases --------------------------------------------------------------------------------------------

    def _base(
        self,
        change: ScriptChange,
        micro_batches: DividedBatches | None,
        operations: StepOperations,
        run: PlanRun,
    ) -> _Base:
        chooser = CheckpointChooser(operations, self._script.seconds)
        bracket = Bracket(chooser, self._budget, run.needs.bytes, self._step)
        return _Base(change, micro_batches, operations, run.time, run, bracket)

    def _first_base(self, tuned: PlanRun, operations: StepOperations) -> _Base:
        """Return the script with its own batches: with a fused optimizer if the peak is in the optimizer."""
        first = self._base(ScriptChange(), None, operations, tuned)
        if not self._allowed.rounding or tuned.place.phase is not Phase.OPTIMIZER:
            return first
        result = self._script.run(ScriptChange(fused=True, operations=True), "fused optimizer")
        if isinstance(result, ScriptEnd) or result.operations is None:
            return first
        run = self._ran(result, {}, 1.0, tune=True, fused=True)
        self._tried.append(run)
        if run.needs.bytes >= tuned.needs.bytes:
            return first
        return self._base(ScriptChange(fused=True), None, result.operations, run)

    def _look_for_divisions(self) -> None:
        if self._allowed.rounding:
            facts = RunFacts.of(self._plain.trace, summarize(self._plain.trace))
            self._divisions = divisions(facts)
            self._undivided = "" if self._divisions else why_indivisible(facts)

    def _divide(self, last: _Base) -> list[_Base]:
        """Run the script with the next smaller batches; return it as a base, or nothing if it must not be."""
        division = self._divisions.pop(0)
        change = division.change | ScriptChange(fused=last.change.fused)
        what = f"{division.micro_batches.count} micro-batches (plan {len(self._tried) + 1})"
        result = self._script.run(change | ScriptChange(operations=True), what)
        if isinstance(result, ScriptEnd):
            fault = why_it_failed(result)
        elif result.operations is None:
            fault = _UNRECORDED
        else:
            fault = "" if last.parts > 1 else why_dependent(last.operations, result.operations)
        if fault or isinstance(result, ScriptEnd) or result.operations is None:
            self._divisions, self._undivided = [], fault
            return []
        draws = any(operation.random for operation in result.operations.forward)
        micro_batches = replace(division.micro_batches, draws=draws)
        step = step_seconds(result.operations, self._script.seconds)
        time = max(micro_batches.count * step / self._step, last.time)
        run = self._ran(
            result,
            division.settings,
            time,
            tune=True,
            micro_batches=micro_batches,
            fused=change.fused,
        )
        self._tried.append(run)
        return [self._base(change, micro_batches, result.operations, run)]

    def _offloading(self, base: _Base) -> _Base:
        chooser = CheckpointChooser(base.operations, self._script.seconds, self._script.copy)
        bracket = Bracket(chooser, self._budget, base.run.needs.bytes, self._step)
        return replace(base, bracket=bracket, offload=True)

    # ---- runs ---------------------------------------------------------------------------------------------

    def _try(self, base: _Base, choice: CheckpointChoice) -> None:
        """Run a plan."""
        regions = _regions(choice)
        settings: dict[str, Any] = dict(base.run.settings)
        settings["checkpointing"] = {"regions": [_plain_region(region) for region in regions]}
        strategies = [PlannedStrategy("checkpointing", (("regions", regions),))]
        count = sum(len(region.modules) for region in regions)
        what = f"{count} module{'s' * (count != 1)} checkpointed"
        if base.offload:
            settings["offload"] = {"what": "inputs"}
            strategies.append(PlannedStrategy("offload", (("what", "inputs"),)))
            what += ", inputs offloaded"
        if base.micro_batches is not None:
            what += f", {base.parts} micro-batches"
        what += f" (plan {len(self._tried) + 1})"
        run = self._script.run_late if base.offload else self._script.run
        result = run(base.change | ScriptChange(tuple(strategies), self._optimizer), what)
        if isinstance(result, ScriptEnd):
            self._refusal = f"With {what}, {why_it_failed(result)}"
            return
        self._models = result.models
        time = self._time(base, choice)
        done = self._ran(
            result,
            settings,
            time,
            tune=True,
            micro_batches=base.micro_batches,
            fused=base.change.fused,
        )
        self._tried.append(done)
        base.bracket.add(choice, done)

    def _ran(
        self,
        result: TrialResult,
        settings: dict[str, Any],
        time: float,
        *,
        tune: bool = False,
        micro_batches: DividedBatches | None = None,
        fused: bool = False,
    ) -> PlanRun:
        """Return what a run needs; with ``tune``, with expandable segments if it fits only with them."""
        found = summarize(result.trace)
        run = ReplayedRun.of(result.trace, found)
        needs, conf = _process(run), ""
        if tune and self._allowed.allocator and needs.bytes > self._budget:
            conf = RunFacts.of(result.trace, found).conf
        if conf and (less := _process(replace(run, conf=conf))).bytes < needs.bytes:
            needs = less
        else:
            conf = ""
        return PlanRun(settings, needs, time, found.peak_place, conf, micro_batches, fused)

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
            models=self._models if chosen is None or "checkpointing" in chosen.settings else (),
            optimizer=self._optimizer,
            command=trace.command,
            versions=trace.versions,
            reason=reason,
            undivided=self._undivided,
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
