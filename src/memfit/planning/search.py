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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

from memfit.analysis.script_change import ScriptChange, TrialResult, why_it_failed
from memfit.errors import TargetError, UsageError
from memfit.planning.allowed import PRECISIONS, Allowed
from memfit.planning.answers import answer, too_small
from memfit.planning.batches import divisions, why_indivisible
from memfit.planning.bracket import WORTH, Bracket
from memfit.planning.changes import FUSED_OPTIMIZER, PlanChange, precision, recomputation
from memfit.planning.choose import CheckpointChoice, CheckpointChooser
from memfit.planning.compiled_search import CompiledSearch
from memfit.planning.plan_runs import PlannedScript, PlanRuns, all_replayed
from memfit.planning.policies import standard_policies
from memfit.planning.sample_independence import why_dependent
from memfit.planning.seconds import step_seconds
from memfit.planning.shardings import (
    OFFLOADED_SHARDS,
    UNSHARDED,
    copy_seconds,
    named_as_in,
    sent_bytes,
    sharded,
    why_dropped,
)
from memfit.records import Phase, PlanRun, ScriptEnd, ScriptPlan, StepOperations

_UNRECORDED = (
    "memfit saw no training step to plan: no optimizer stepped twice, the script calls no module of its "
    "model, or torch.compile uses another compiler than Inductor."
)
_MOST_RUNS = 10
"""Plans that run on the ghost at most, with and without offload."""


def find_plan(
    script: PlannedScript,
    budget: int,
    allowed: Allowed = Allowed(),  # noqa: B008 - frozen
    *,
    policies: bool = False,
) -> ScriptPlan:
    """Return the fastest plan of a script under a budget.

    Args:
        script: the script.
        budget: bytes of the process, the CUDA context included.
        allowed: what the plan may change.
        policies: whether the policies that people use are run, too.

    Raises:
        TargetError: the script as written cannot be run, or cannot be trained on several GPUs.
        UsageError: it is compiled, and trains on one GPU of several.
    """
    plain = script.run(ScriptChange(operations=True), "as written, operation by operation")
    if isinstance(plain, ScriptEnd):
        raise TargetError(f"memfit cannot plan for the script: {why_it_failed(plain)}")
    compiled = plain.operations is not None and plain.operations.compiled
    if script.is_to_be_sharded(plain) and compiled:
        raise UsageError(
            "memfit cannot plan how to train a compiled script on several GPUs. memfit compare --nproc shows "
            "what it needs with DDP, ZeRO-1 and FSDP2."
        )
    search = (CompiledSearch if compiled else _PlanSearch)(script, plain, budget, allowed)
    found = search.plan()
    return replace(found, policies=search.policies()) if policies else found


@dataclass(frozen=True, slots=True)
class _Base:
    """The script with batches of one size; what to recompute in it is still to be chosen."""

    plan: PlanChange
    operations: StepOperations
    run: PlanRun
    """With nothing recomputed."""
    bracket: Bracket
    offload: bool = False
    """Whether the inputs of recomputed modules wait on the host."""
    copies: float = 0.0
    """Time of copies of shards in each micro-batch, relative to a step of the script as written."""


class _PlanSearch:
    def __init__(self, script: PlannedScript, plain: TrialResult, budget: int, allowed: Allowed) -> None:
        self._script, self._plain, self._budget, self._allowed = script, plain, budget, allowed
        self._runs = PlanRuns(script, budget, tune=allowed.allocator)
        self._optimizer = plain.operations.optimizer if plain.operations is not None else None
        self._models: tuple[str, ...] = ()
        self._refusal = ""  # why nothing can be recomputed
        self._undivided = ""  # why batches are not divided, or no further
        self._divisions: list[PlanChange] = []
        self._dropped: list[str] = []
        self._step = 0.0  # seconds of a step as written

    def plan(self) -> ScriptPlan:
        plain = all_replayed(self._plain)
        if self._plain.operations is not None:
            self._step = step_seconds(self._plain.operations, self._script.seconds)
        if self._script.is_to_be_sharded(self._plain):
            return self._plan_shardings()
        as_written = self._runs.needs(plain, PlanChange(), 1.0, tune=False)
        if self._runs.fits(as_written):
            return self._answer(as_written, chosen=as_written)
        tuned = self._runs.needs(plain, PlanChange(), 1.0)
        if tuned.conf:
            self._runs.tried.append(tuned)
        if self._runs.fits(tuned):
            return self._answer(as_written, chosen=tuned)
        if self._plain.operations is None:
            return self._answer(as_written, smallest=tuned, reason=_UNRECORDED)
        return self._combine(as_written, [self._base(PlanChange(), self._plain.operations, tuned)])

    def _plan_shardings(self) -> ScriptPlan:
        """Train a script for one GPU on several: with what moves least, if that is enough."""
        found = sharded(self._runs, rounding=self._allowed.rounding)
        self._models, self._dropped = found.models, found.dropped
        if found.as_written is None:
            raise TargetError(f"memfit cannot plan for {self._script.ranks} GPUs. {found.dropped[0]}")
        if found.chosen is not None or found.least is None:
            return self._answer(found.as_written, chosen=found.chosen)
        least, result, run = found.least
        if result.operations is None or self._plain.operations is None:
            return self._answer(found.as_written, smallest=run, reason=_UNRECORDED)
        start = self._base(least, result.operations, run)
        offloaded = self._offloaded_shards(found.as_written) if self._allowed.rounding else ()
        return self._combine(found.as_written, chain([start], offloaded))

    def _offloaded_shards(self, as_written: PlanRun) -> Iterator[_Base]:
        """Yield the script with its shards on the host, if it can be run so."""
        copies = copy_seconds(as_written.terms, self._script.copy, self._script.ranks) / self._step
        made = self._runs.make(OFFLOADED_SHARDS, 1.0 + copies, operations=True)
        if isinstance(made, ScriptEnd):
            self._dropped.append(why_dropped(OFFLOADED_SHARDS, made))
        elif made[0].operations is not None:
            self._models = made[0].models
            yield replace(self._base(OFFLOADED_SHARDS, made[0].operations, made[1]), copies=copies)

    def _combine(self, as_written: PlanRun, starts: Iterable[_Base]) -> ScriptPlan:
        """Change more about what does not fit; the next start is made if nothing fits with those before."""
        chosen, bases = None, []
        for root in (root for start in starts for root in self._roots(start)):
            self._look_for_divisions()
            added = [root]
            chosen = self._search(added)
            bases += added
            if chosen is not None:
                break
        if chosen is None and not self._refusal:
            smallest_parts, self._divisions = self._divisions[-1:], []
            bases = [self._offloading(base) for base in bases]
            chosen = self._search(bases) or self._every_block(bases, smallest_parts)
        if chosen is None:
            ran = [*self._runs.tried, *(base.run for base in bases)]
            smallest = min(ran, key=lambda each: each.needs.bytes)
            reason = self._refusal or self._too_small(smallest)
            return self._answer(as_written, smallest=smallest, reason=reason)
        bound = min(base.run.time + base.plan.parts * self._least(base) / self._step for base in bases)
        return self._answer(as_written, chosen=chosen, bound=min(bound, chosen.time))

    def _search(self, bases: list[_Base]) -> PlanRun | None:
        """Return the fastest plan that fits, if one does; bases are added while they may pay."""
        most = len(self._runs.tried) + _MOST_RUNS
        while True:
            fitting = [run for base in bases if (run := self._best(base)) is not None]
            best = min(fitting, key=lambda run: run.time, default=None)
            worth = [base for base in bases if best is None or self._may_be_taken(base)]
            found = [] if self._refusal else [each for base in worth if (each := self._proposal(base))]
            fits = [each for each in found if each[0].bracket.needs(each[1]) <= self._budget]
            likely = min(fits, key=lambda each: self._time(*each), default=None)
            times = [run.time for run in fitting] + [self._time(*each) for each in fits]
            if self._divisions and bases[-1].run.time < min(times, default=float("inf")) - WORTH:
                bases.extend(self._divide(bases[0], bases[-1]))
                continue
            if len(self._runs.tried) >= most:
                return best
            smallest = min(found, key=lambda each: each[0].bracket.needs(each[1]), default=None)
            if likely is not None and (best is None or self._time(*likely) < best.time - WORTH):
                self._try(*likely)
            elif best is None and smallest is not None and self._may_be_smallest(*smallest):
                self._try(*smallest)
            else:
                return best

    def _best(self, base: _Base) -> PlanRun | None:
        """Return the fastest run of a base that fits."""
        if self._runs.fits(base.run):
            return base.run
        return base.bracket.best[1] if base.bracket.best is not None else None

    def _proposal(self, base: _Base) -> tuple[_Base, CheckpointChoice] | None:
        choice = None if self._runs.fits(base.run) else base.bracket.next()
        return None if choice is None else (base, choice)

    def _time(self, base: _Base, choice: CheckpointChoice) -> float:
        return base.run.time + base.plan.parts * choice.seconds / self._step

    def _may_be_taken(self, base: _Base) -> bool:
        """Return whether a plan of a base may fit in the time that is allowed."""
        return base.run.time + base.plan.parts * base.bracket.least / self._step <= self._allowed.slowdown

    def _least(self, base: _Base) -> float:
        """Return a bound of the seconds that what fits adds to a base."""
        return 0.0 if self._runs.fits(base.run) else base.bracket.bound

    def _may_be_smallest(self, base: _Base, choice: CheckpointChoice) -> bool:
        """Return whether a choice is predicted to need less than every plan that ran."""
        return base.bracket.needs(choice) < min(
            (run.needs.bytes for run in self._runs.tried), default=base.run.needs.bytes
        )

    # ---- bases --------------------------------------------------------------------------------------------

    def _base(self, plan: PlanChange, operations: StepOperations, run: PlanRun) -> _Base:
        if self._plain.operations is not None:
            operations = named_as_in(self._plain.operations, operations)
        chooser = CheckpointChooser(operations, self._script.seconds)
        return _Base(plan, operations, run, Bracket(chooser, self._budget, run.needs.bytes, self._step))

    def _roots(self, start: _Base) -> list[_Base]:
        """Return the script with whole batches: first with what lowers its peak in no more time."""
        roots = [start]
        for name in self._allowed.precisions:
            roots += self._lower(start, start.plan | precision(name, PRECISIONS[name]))
        roots.sort(key=lambda base: base.run.needs.bytes)
        if self._allowed.rounding and roots[0].run.place.phase is Phase.OPTIMIZER:
            fused = roots[0].plan | FUSED_OPTIMIZER
            roots = [*(self._lower(roots[0], fused) or roots[:1]), *roots[1:]]
        return roots

    def _lower(self, base: _Base, plan: PlanChange) -> list[_Base]:
        """Run the script under a change; return it as a base, or nothing if it needs no less than another."""
        made = self._runs.make(
            plan, lambda result: self._relative(result, copies=base.copies), operations=True
        )
        if isinstance(made, ScriptEnd) or made[0].operations is None:
            return []
        if made[1].needs.bytes >= base.run.needs.bytes:
            return []
        self._models = made[0].models
        return [replace(self._base(plan, made[0].operations, made[1]), copies=base.copies)]

    def _relative(self, result: TrialResult, parts: int = 1, copies: float = 0.0) -> float:
        """Return the time of a recorded run's step, relative to the script as written; copies as in _Base."""
        if result.operations is None:
            return float("inf")
        return parts * (step_seconds(result.operations, self._script.seconds) / self._step + copies)

    def _look_for_divisions(self) -> None:
        if self._allowed.rounding:
            self._divisions = divisions(self._plain.trace, draws=self._draws())
            self._undivided = "" if self._divisions else why_indivisible(self._plain.trace)

    def _draws(self) -> bool:
        operations = self._plain.operations
        return operations is not None and any(each.random for each in operations.forward)

    def _divide(self, whole: _Base, last: _Base) -> list[_Base]:
        """Run the script with the next smaller batches; return it as a base, or nothing if it must not be."""
        division = self._divisions.pop(0)
        plan = whole.plan | division
        made = self._runs.make(
            plan,
            lambda result: max(self._relative(result, plan.parts, whole.copies), last.run.time),
            operations=True,
        )
        if isinstance(made, ScriptEnd):
            fault = why_it_failed(made)
        elif made[0].operations is None:
            fault = f"memfit saw no two updates of {plan.parts} batches each (the script ends before)"
        else:
            fault = "" if last.plan.parts > 1 else why_dependent(last.operations, made[0].operations)
        if fault or isinstance(made, ScriptEnd) or made[0].operations is None:
            self._divisions, self._undivided = [], fault
            if not isinstance(made, ScriptEnd):
                self._runs.tried.pop()
            return []
        return [replace(self._base(plan, made[0].operations, made[1]), copies=whole.copies)]

    def _offloading(self, base: _Base) -> _Base:
        chooser = CheckpointChooser(base.operations, self._script.seconds, self._script.copy)
        bracket = Bracket(chooser, self._budget, base.run.needs.bytes, self._step)
        return replace(base, bracket=bracket, offload=True)

    def _try(self, base: _Base, choice: CheckpointChoice) -> None:
        """Run a plan, and correct the model of its base."""
        change = recomputation(choice, self._optimizer, offload=base.offload)
        made = self._runs.make(base.plan | change, self._time(base, choice))
        if isinstance(made, ScriptEnd):
            self._refusal = f"With {', '.join((*base.plan.words, *change.words))}, {why_it_failed(made)}"
            return
        result, run = made
        self._models = result.models
        base.bracket.add(choice, run)

    def _every_block(self, bases: list[_Base], smallest_parts: list[PlanChange]) -> PlanRun | None:
        """Checkpoint every block, in the smallest micro-batches; None if that does not fit either.

        Args:
            bases: the last ones that were searched.
            smallest_parts: the smallest division of batches, unless it is a base already.
        """
        base = min(bases, key=lambda base: base.run.needs.bytes)
        least = base.plan
        if smallest_parts:
            least = next(base.plan for base in bases if base.plan.parts == 1) | smallest_parts[0]
        made = self._runs.make(
            least | standard_policies(self._optimizer)[0],
            lambda result: self._relative(result, least.parts, base.copies),
            operations=True,
        )
        if isinstance(made, ScriptEnd) or not self._runs.fits(made[1]):
            return None
        self._models = made[0].models
        return made[1]

    def policies(self) -> tuple[PlanRun, ...]:
        """Run the policies that people use; those that the script or its model refuses are left out."""
        if not self._step:
            return ()
        runs = PlanRuns(self._script, self._budget, tune=self._allowed.allocator)
        unchanged = UNSHARDED if self._script.is_to_be_sharded(self._plain) else PlanChange()
        for policy in standard_policies(self._optimizer):
            runs.make(unchanged | policy, self._relative, operations=True)
        return tuple(runs.tried)

    # ---- the answer ---------------------------------------------------------------------------------------

    def _too_small(self, smallest: PlanRun) -> str:
        shards = "shards the model, " * ("sharding" in smallest.settings)
        divided = "divides batches, " * (smallest.divided is not None)
        return too_small(
            smallest,
            f"{shards}{divided}recomputes activations, and offloads the inputs of what it recomputes",
        )

    def _answer(
        self,
        as_written: PlanRun,
        *,
        chosen: PlanRun | None = None,
        smallest: PlanRun | None = None,
        bound: float = 1.0,
        reason: str = "",
    ) -> ScriptPlan:
        found = answer(
            self._script,
            self._plain,
            self._budget,
            as_written,
            self._runs.tried,
            self._models,
            chosen=chosen,
            smallest=smallest,
            reason=reason,
            undivided=self._undivided,
            slowdown=self._allowed.slowdown,
        )
        found = replace(found, bound=bound, dropped=tuple(self._dropped))
        if found.chosen is None or "sharding" not in found.chosen.settings:
            return found
        before, now = (
            sent_bytes(run, as_written.terms, self._script.ranks) for run in (as_written, found.chosen)
        )
        return replace(found, sent=(before, now))
