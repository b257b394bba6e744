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

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from memfit.analysis.script_change import ScriptChange, TrialResult, why_it_failed
from memfit.errors import TargetError, UsageError
from memfit.planning.allowed import Allowed
from memfit.planning.answers import answer, too_small
from memfit.planning.bases import Base, Bases
from memfit.planning.batches import divisions, why_indivisible
from memfit.planning.bracket import WORTH
from memfit.planning.changes import PlanChange, recomputation
from memfit.planning.choose import CheckpointChoice
from memfit.planning.compiled_search import CompiledSearch
from memfit.planning.mixed_integer_program import INFINITY
from memfit.planning.optimizer_changes import steps_in_backward
from memfit.planning.plan_runs import PlannedScript, PlanRuns, all_replayed
from memfit.planning.policies import standard_policies
from memfit.planning.same_samples import samples_of_parts, with_samples
from memfit.planning.sample_independence import why_dependent, why_no_mean
from memfit.planning.shardings import (
    OFFLOADED_SHARDS,
    UNSHARDED,
    copy_seconds,
    sent_bytes,
    sharded,
    why_dropped,
)
from memfit.records import Phase, PlanRun, ScriptEnd, ScriptPlan

_UNRECORDED = (
    "memfit saw no training step to plan: no optimizer stepped twice, the script calls no module of its "
    "model, or torch.compile uses another compiler than Inductor."
)
_MOST_RUNS = 10
"""Plans that run on the ghost at most, with and without offload."""
_PREDICTED_WITHIN = 0.1
"""Share of what a plan needs by which a prediction may be too high: of plans of ResNet-50, up to 0.07."""


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


class _PlanSearch:
    def __init__(self, script: PlannedScript, plain: TrialResult, budget: int, allowed: Allowed) -> None:
        self._script, self._plain, self._budget, self._allowed = script, plain, budget, allowed
        self._runs = PlanRuns(script, budget, tune=allowed.allocator)
        self._optimizer = plain.operations.optimizer if plain.operations is not None else None
        self._refusal = ""  # why nothing can be recomputed
        self._undivided = ""  # why batches are not divided, or no further
        self._divisions: list[PlanChange] = []
        self._chosen: PlanRun | None = None  # the fastest so far that fits
        self._bases = Bases(script, plain, self._runs, budget, allowed)
        self._step = self._bases.step

    def plan(self) -> ScriptPlan:
        plain = all_replayed(self._plain)
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
        return self._combine(as_written, [self._bases.base(PlanChange(), self._plain.operations, tuned)])

    def _plan_shardings(self) -> ScriptPlan:
        """Train a script for one GPU on several: with what moves least, if that is enough."""
        found = sharded(self._runs, rounding=self._allowed.rounding)
        self._bases.models, self._bases.dropped = found.models, found.dropped
        if found.as_written is None:
            raise TargetError(f"memfit cannot plan for {self._script.ranks} GPUs. {found.dropped[0]}")
        if found.chosen is not None or found.least is None:
            return self._answer(found.as_written, chosen=found.chosen)
        least, result, run = found.least
        if result.operations is None or self._plain.operations is None:
            return self._answer(found.as_written, smallest=run, reason=_UNRECORDED)
        start = self._bases.base(least, result.operations, run)
        offloaded = self._offloaded_shards(found.as_written) if self._allowed.rounding else ()
        return self._combine(found.as_written, chain([start], offloaded))

    def _offloaded_shards(self, as_written: PlanRun) -> Iterator[Base]:
        """Yield the script with its shards on the host, if it can be run so."""
        copies = copy_seconds(as_written.terms, self._script.copy, self._script.ranks) / self._step
        made = self._runs.make(OFFLOADED_SHARDS, 1.0 + copies, operations=True)
        if isinstance(made, ScriptEnd):
            self._bases.dropped.append(why_dropped(OFFLOADED_SHARDS, made))
        elif made[0].operations is not None:
            self._bases.models = made[0].models
            yield replace(self._bases.base(OFFLOADED_SHARDS, made[0].operations, made[1]), copies=copies)

    def _combine(self, as_written: PlanRun, starts: Iterable[Base]) -> ScriptPlan:
        """Change more about what does not fit; the next start is made if nothing fits with those before."""
        bases: list[Base] = []
        smallest_parts: list[PlanChange] = []
        for start in starts:
            for root in self._bases.roots(start, lambda: self._chosen):
                self._look_for_divisions(root)
                added = [root]
                self._chosen = self._search(added)
                bases += added
                smallest_parts, self._divisions = self._divisions[-1:] or smallest_parts, []
            if self._chosen is not None:
                break
        if self._chosen is None and not self._refusal:
            bases = [self._bases.offloading(base) for base in bases]
            self._chosen = self._search(bases)
        if self._chosen is None:
            self._chosen = self._every_block(bases, smallest_parts)
        if self._chosen is None:
            ran = [*self._runs.tried, *(base.run for base in bases)]
            smallest = min(ran, key=lambda each: each.needs.bytes)
            reason = self._refusal or self._too_small(smallest)
            return self._answer(as_written, smallest=smallest, reason=reason)
        bound = min(base.run.time + base.plan.parts * self._least(base) / self._step for base in bases)
        return self._answer(as_written, chosen=self._chosen, bound=min(bound, self._chosen.time))

    def _search(self, bases: list[Base]) -> PlanRun | None:
        """Return the fastest plan that fits, if one does; bases are added while they may pay."""
        most = len(self._runs.tried) + _MOST_RUNS
        while True:
            fitting = [run for run in (self._chosen, *map(self._best, bases)) if run is not None]
            best = min(fitting, key=lambda run: run.time, default=None)
            worth = [base for base in bases if best is None or self._may_be_taken(base)]
            worth = [base for base in worth if not self._needs_too_much_to_update(base)]
            found = [] if self._refusal else [each for base in worth if (each := self._proposal(base))]
            fits = [each for each in found if each[0].bracket.needs(each[1]) <= self._budget]
            likely = min(fits, key=lambda each: self._time(*each), default=None)
            times = [run.time for run in fitting] + [self._time(*each) for each in fits]
            may_divide = self._divisions and not self._needs_too_much_to_update(bases[-1])
            if may_divide and bases[-1].run.time < min(times, default=float("inf")) - WORTH:
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

    def _needs_too_much_to_update(self, base: Base) -> bool:
        """Return whether an update, when no activation exists, already allocates more than the budget."""
        run = base.run
        outside = run.needs.bytes - run.reserved.bytes
        return run.place.phase is Phase.OPTIMIZER and (run.allocated or 0) + outside > self._budget

    def _best(self, base: Base) -> PlanRun | None:
        """Return the fastest run of a base that fits."""
        if self._runs.fits(base.run):
            return base.run
        return base.bracket.best[1] if base.bracket.best is not None else None

    def _proposal(self, base: Base) -> tuple[Base, CheckpointChoice] | None:
        choice = None if self._runs.fits(base.run) else base.bracket.next()
        return None if choice is None else (base, choice)

    def _time(self, base: Base, choice: CheckpointChoice) -> float:
        return base.run.time + base.plan.parts * choice.seconds / self._step

    def _may_be_taken(self, base: Base) -> bool:
        """Return whether a plan of a base may fit in the time that is allowed."""
        return base.run.time + base.plan.parts * base.bracket.least / self._step <= self._allowed.slowdown

    def _least(self, base: Base) -> float:
        """Return a bound of the seconds that what fits adds to a base."""
        if self._needs_too_much_to_update(base):
            return INFINITY
        return 0.0 if self._runs.fits(base.run) else base.bracket.bound

    def _may_be_smallest(self, base: Base, choice: CheckpointChoice) -> bool:
        """Return whether a choice may need less than every plan that ran."""
        smallest = min((run.needs.bytes for run in self._runs.tried), default=base.run.needs.bytes)
        return base.bracket.needs(choice) < smallest * (1 + _PREDICTED_WITHIN)

    # ---- bases --------------------------------------------------------------------------------------------

    def _look_for_divisions(self, root: Base) -> None:
        """Find the ways to divide batches, where that goes with a root's change."""
        if self._allowed.rounding and not steps_in_backward(root.plan):
            self._divisions = divisions(self._plain.trace, draws=self._draws())
            self._undivided = "" if self._divisions else why_indivisible(self._plain.trace)

    def _draws(self) -> bool:
        operations = self._plain.operations
        return operations is not None and any(each.random for each in operations.forward)

    def _divide(self, whole: Base, last: Base) -> list[Base]:
        """Run the script with the next smaller batches; return it as a base, or nothing if it must not be."""
        division = self._divisions.pop(0)
        plan = whole.plan | division
        made = self._runs.make(
            plan,
            lambda result: max(self._bases.relative(plan, result, whole.copies), last.run.time),
            operations=True,
        )
        if isinstance(made, ScriptEnd):
            fault = why_it_failed(made)
        elif made[0].operations is None:
            fault = f"memfit saw no two updates of {plan.parts} batches each (the script ends before)"
        else:
            fault = "" if last.plan.parts > 1 else why_dependent(last.operations, made[0].operations)
            fault = fault or why_no_mean(made[0].operations)
            samples = samples_of_parts(whole.operations, made[0].operations, plan.parts)
            fault = fault or samples.why
        if fault or isinstance(made, ScriptEnd) or made[0].operations is None:
            self._divisions, self._undivided = [], fault
            if not isinstance(made, ScriptEnd):
                self._runs.tried.pop()
            return []
        plan = with_samples(plan, samples)
        run = self._runs.tried[-1] = replace(made[1], divided=plan.divided)
        return [replace(self._bases.base(plan, made[0].operations, run), copies=whole.copies)]

    def _try(self, base: Base, choice: CheckpointChoice) -> None:
        """Run a plan, and correct the model of its base."""
        change = recomputation(choice, self._optimizer, offload=base.offload)
        made = self._runs.make(base.plan | change, self._time(base, choice))
        if isinstance(made, ScriptEnd):
            self._refusal = f"With {', '.join((*base.plan.words, *change.words))}, {why_it_failed(made)}"
            return
        result, run = made
        self._bases.models = result.models
        base.bracket.add(choice, run)

    def _every_block(self, bases: list[Base], smallest_parts: list[PlanChange]) -> PlanRun | None:
        """Checkpoint every block, in the smallest micro-batches; None if that does not fit either.

        Args:
            bases: the last ones that were searched.
            smallest_parts: the smallest division of batches, unless it is a base already.
        """
        base = min(bases, key=lambda base: base.run.needs.bytes)
        least = base.plan
        if smallest_parts:
            whole = (each for each in bases if each.plan.parts == 1 and not steps_in_backward(each.plan))
            base = min(whole, key=lambda base: base.run.needs.bytes)
            least = base.plan | smallest_parts[0]
        made = self._runs.make(
            least | standard_policies(self._optimizer)[0],
            functools.partial(self._bases.relative, least, copies=base.copies),
            operations=True,
        )
        if isinstance(made, ScriptEnd) or not self._runs.fits(made[1]):
            return None
        self._bases.models = made[0].models
        return made[1]

    def policies(self) -> tuple[PlanRun, ...]:
        """Run the policies that people use; those that the script or its model refuses are left out."""
        if not self._step:
            return ()
        runs = PlanRuns(self._script, self._budget, tune=self._allowed.allocator)
        unchanged = UNSHARDED if self._script.is_to_be_sharded(self._plain) else PlanChange()
        for policy in standard_policies(self._optimizer):
            plan = unchanged | policy
            runs.make(plan, functools.partial(self._bases.relative, plan), operations=True)
        return tuple(runs.tried)

    # ---- the answer ---------------------------------------------------------------------------------------

    def _too_small(self, smallest: PlanRun) -> str:
        ways = ["shards the model"] * ("sharding" in smallest.settings)
        ways += ["divides batches"] * (smallest.divided is not None)
        ways += ["recomputes activations", "offloads the inputs of what it recomputes"]
        if any("optimizer_state" in run.settings for run in self._runs.tried):
            ways.append("updates parameters in the backward or offloads the optimizer's state")
        return too_small(smallest, f"{', '.join(ways[:-1])}, and {ways[-1]}")

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
            self._bases.models,
            chosen=chosen,
            smallest=smallest,
            reason=reason,
            undivided=self._undivided,
            slowdown=self._allowed.slowdown,
        )
        found = replace(found, bound=bound, dropped=tuple(self._bases.dropped))
        if found.chosen is None or "sharding" not in found.chosen.settings:
            return found
        before, now = (
            sent_bytes(run, as_written.terms, self._script.ranks) for run in (as_written, found.chosen)
        )
        return replace(found, sent=(before, now))
