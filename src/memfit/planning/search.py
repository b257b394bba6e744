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

from dataclasses import dataclass, replace

from memfit.analysis.script_change import ScriptChange, TrialResult, why_it_failed
from memfit.errors import TargetError
from memfit.planning.allowed import PRECISIONS, Allowed
from memfit.planning.answers import answer, too_small
from memfit.planning.batches import divisions, why_indivisible
from memfit.planning.bracket import WORTH, Bracket
from memfit.planning.changes import FUSED_OPTIMIZER, PlanChange, precision, recomputation
from memfit.planning.choose import CheckpointChoice, CheckpointChooser
from memfit.planning.compiled_search import CompiledSearch
from memfit.planning.plan_runs import PlannedScript, PlanRuns, replayed
from memfit.planning.policies import standard_policies
from memfit.planning.sample_independence import why_dependent
from memfit.planning.seconds import step_seconds
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
        TargetError: the script as written cannot be run.
    """
    plain = script.run(ScriptChange(operations=True), "as written, operation by operation")
    if isinstance(plain, ScriptEnd):
        raise TargetError(f"memfit cannot plan for the script: {why_it_failed(plain)}")
    compiled = plain.operations is not None and plain.operations.compiled
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


class _PlanSearch:
    def __init__(self, script: PlannedScript, plain: TrialResult, budget: int, allowed: Allowed) -> None:
        self._script, self._plain, self._budget, self._allowed = script, plain, budget, allowed
        self._runs = PlanRuns(script, budget, tune=allowed.allocator)
        self._optimizer = plain.operations.optimizer if plain.operations is not None else None
        self._models: tuple[str, ...] = ()
        self._refusal = ""  # why nothing can be recomputed
        self._undivided = ""  # why batches are not divided, or no further
        self._divisions: list[PlanChange] = []
        self._step = 0.0  # seconds of a step as written

    def plan(self) -> ScriptPlan:
        plain = replayed(self._plain)
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
        self._step = step_seconds(self._plain.operations, self._script.seconds)
        chosen, bases = None, []
        for root in self._roots(tuned, self._plain.operations):
            self._look_for_divisions()
            chain = [root]
            chosen = self._search(chain)
            bases += chain
            if chosen is not None:
                break
        if chosen is None and not self._refusal:
            smallest_parts, self._divisions = self._divisions[-1:], []
            bases = [self._offloading(base) for base in bases]
            chosen = self._search(bases) or self._every_block(bases, smallest_parts)
        if chosen is None:
            smallest = min([*self._runs.tried, tuned], key=lambda each: each.needs.bytes)
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
        chooser = CheckpointChooser(operations, self._script.seconds)
        return _Base(plan, operations, run, Bracket(chooser, self._budget, run.needs.bytes, self._step))

    def _roots(self, tuned: PlanRun, operations: StepOperations) -> list[_Base]:
        """Return the script with whole batches: first with what lowers its peak in no more time."""
        plain = self._base(PlanChange(), operations, tuned)
        roots = [plain]
        for name in self._allowed.precisions:
            roots += self._lower(plain, precision(name, PRECISIONS[name]))
        roots.sort(key=lambda base: base.run.needs.bytes)
        if self._allowed.rounding and roots[0].run.place.phase is Phase.OPTIMIZER:
            fused = roots[0].plan | FUSED_OPTIMIZER
            roots = [*(self._lower(roots[0], fused) or roots[:1]), *roots[1:]]
        return roots

    def _lower(self, base: _Base, plan: PlanChange) -> list[_Base]:
        """Run the script under a change; return it as a base, or nothing if it needs no less than another."""
        made = self._runs.make(plan, self._relative, operations=True)
        if isinstance(made, ScriptEnd) or made[0].operations is None:
            return []
        if made[1].needs.bytes >= base.run.needs.bytes:
            return []
        self._models = made[0].models
        return [self._base(plan, made[0].operations, made[1])]

    def _relative(self, result: TrialResult, parts: int = 1) -> float:
        """Return the time of a recorded run's step, relative to the script as written."""
        if result.operations is None:
            return float("inf")
        return parts * step_seconds(result.operations, self._script.seconds) / self._step

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
            plan, lambda result: max(self._relative(result, plan.parts), last.run.time), operations=True
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
        return [self._base(plan, made[0].operations, made[1])]

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
        least = min(bases, key=lambda base: base.run.needs.bytes).plan
        if smallest_parts:
            least = next(base.plan for base in bases if base.plan.parts == 1) | smallest_parts[0]
        made = self._runs.make(
            least | standard_policies(self._optimizer)[0],
            lambda result: self._relative(result, least.parts),
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
        for policy in standard_policies(self._optimizer):
            runs.make(policy, self._relative, operations=True)
        return tuple(runs.tried)

    # ---- the answer ---------------------------------------------------------------------------------------

    def _too_small(self, smallest: PlanRun) -> str:
        divided = "divides batches, " * (smallest.divided is not None)
        return too_small(
            smallest, f"{divided}recomputes activations, and offloads the inputs of what it recomputes"
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
        return replace(found, bound=bound)
