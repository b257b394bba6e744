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

Where the CUDA context is assumed, the search first looks for plans that leave room for a larger one. If it
finds none, the fastest that fits is tight: from what has run by then, it goes on for the whole budget.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from memfit.analysis.trial_result import TrialResult, why_run_failed
from memfit.errors import TargetError, UsageError
from memfit.planning.batch_divisions_to_try import BatchDivisionsToTry
from memfit.planning.bracket_checkpoint_choices import WORTH
from memfit.planning.checkpointing_bases import CheckpointingBase, CheckpointingBases
from memfit.planning.choose_checkpointing import CheckpointChoice
from memfit.planning.find_compiled_plan import CompiledPlanSearch
from memfit.planning.host_limited_times import with_time_of_host
from memfit.planning.mixed_integer_solver import INFINITY
from memfit.planning.plan_search_base import (
    TOO_LATE,
    OnFound,
    OutOfTimeError,
    PlanSearch,
    ways_tried,
    why_smallest_exceeds_budget,
)
from memfit.planning.run_changes_on_ghost import (
    PlannedScript,
    PlanRuns,
    is_made_by_loop,
    replayable_runs_of_ranks,
)
from memfit.planning.shardings import (
    OFFLOADED_SHARDS,
    UNSHARDED,
    bytes_sent_before_and_under,
    own_sharding_changes,
    shardings_to_try,
)
from memfit.planning.strategy_and_allocator_changes import (
    AllowedChanges,
    block_checkpointing_policies,
    checkpoint_choice_change,
)
from memfit.records import Change, PlanRun, ScriptEnd, ScriptPlan
from memfit.timing.step_time import step_time_of_trace

_UNRECORDED = (
    "memfit saw no training step to plan: no optimizer stepped twice, the script calls no module of its "
    "model, or torch.compile uses another compiler than Inductor."
)
_Sharded = tuple[Change, TrialResult, PlanRun]
"""How the script is sharded, and its run."""
_Proposal = tuple[CheckpointingBase, CheckpointChoice]
_MOST_RUNS = 16  # plans that run on the ghost at most


def find_plan(
    script: PlannedScript,
    budget: int,
    allowed: AllowedChanges = AllowedChanges(),  # noqa: B008 - frozen
    *,
    policies: bool = False,
    on_found: OnFound = lambda _: None,
) -> ScriptPlan:
    """Return the fastest plan of a script under a budget.

    Args:
        script: the script.
        budget: bytes of the process, the CUDA context included.
        allowed: what the plan may change.
        policies: whether the policies that people use are run, too.
        on_found: called with the answer so far whenever there is a plan that fits, and a better one.

    Raises:
        TargetError: the script as written cannot be run, or not in time; or not be trained on several GPUs.
        UsageError: it is compiled, and trains on one GPU of several.
    """
    try:
        plain = script.run(Change(operations=True), "as written, operation by operation")
    except OutOfTimeError:
        raise TargetError(TOO_LATE) from None
    if isinstance(plain, ScriptEnd):
        raise TargetError(f"memfit cannot plan for the script: {why_run_failed(plain)}")
    script = with_time_of_host(script, plain)
    compiled = plain.operations is not None and plain.operations.compiled
    if script.is_to_be_sharded(plain) and compiled:
        raise UsageError(
            "memfit cannot plan how to train a compiled script on several GPUs. memfit compare --nproc shows "
            "what it needs with DDP, ZeRO-1 and FSDP2."
        )
    search = (CompiledPlanSearch if compiled else _OperationSearch)(script, plain, budget, allowed, on_found)
    try:
        found = search.plan()
    except OutOfTimeError:
        return search.so_far()
    if found.chosen is not None:
        on_found(found)
    try:
        return replace(found, policies=search.policies()) if policies else found
    except OutOfTimeError:
        return found


class _OperationSearch(PlanSearch):
    """A search for a script whose operations are known one by one."""

    _least_time = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._ran_in_blocks: set[Change] = set()  # the bases that were run with every block checkpointed
        self._refusal = ""  # why nothing can be recomputed
        self._in_loop: PlanRun | None = None  # the fastest plan, if it takes a change of the loop
        budget, allowed = self._budget, self._allowed
        self._bases = CheckpointingBases(self._script, self._plain, self._runs, budget, allowed)
        self._divisions = BatchDivisionsToTry(self._plain, self._runs, self._bases, budget, allowed)

    @property
    def _ran(self) -> list[PlanRun]:
        return self._divisions.left_to_memfit(super()._ran)

    def plan(self) -> ScriptPlan:
        """Return the fastest plan found, or why there is none."""
        if self._script.is_to_be_sharded(self._plain):
            return self._plan_shardings()
        return super().plan()

    def _search_from(self, tuned: PlanRun) -> ScriptPlan:
        if self._runs.fits(tuned):
            return self._answer(chosen=tuned)
        free, offloads = (
            own_sharding_changes(self._plain.sharding_calls, offloads=offloads) for offloads in (False, True)
        )
        tried = self._try_shardings(free)
        return self._go_on([(Change(), self._plain, tuned), *tried], self._offloaded_shards(offloads))

    def _plan_shardings(self) -> ScriptPlan:
        """Train a script for one GPU on several: with what moves least, if that is enough."""
        # Plain data parallelism is what others are compared with.
        self._runs.written = self._runs.watched = None
        tried = self._try_shardings(shardings_to_try(rounding=self._allowed.rounding))
        if not tried:
            raise TargetError(f"memfit cannot plan for {self._script.ranks} GPUs. {self._runs.dropped[0]}")
        change, result, run = tried[0]  # what moves least: DDP, unless it does not suit the script
        as_written = self._runs.needs(replayable_runs_of_ranks(result), change, 1.0, tune=False)
        if run == as_written:
            self._runs.tried.remove(run)
            tried[0] = change, result, as_written
        self._as_written = as_written
        offloaded = self._offloaded_shards((OFFLOADED_SHARDS,))
        return self._go_on(tried, offloaded)

    def _try_shardings(self, changes: Iterable[Change]) -> list[_Sharded]:
        """Run the script under changes of how it is sharded, until it fits; leave out what it refuses."""
        tried: list[_Sharded] = []
        for change in changes:
            made = self._runs.make(change, 1.0, operations=True)
            if isinstance(made, ScriptEnd):
                self._runs.drop(change, why_run_failed(made))
                continue
            if not tried and self._script.is_to_be_sharded(self._plain):
                self._runs.written = self._runs.watched = step_time_of_trace(made[0].trace)
            tried.append((change, *made))
            self._runs.models = made[0].models
            if self._runs.fits(made[1]):
                break
        return tried

    def _go_on(self, tried: Iterable[_Sharded], offloaded: Iterator[CheckpointingBase]) -> ScriptPlan:
        """Change more about the run that needs least, unless it fits; then move its shards to the host."""
        change, result, run = min(tried, key=lambda each: each[2].needs.bytes)
        if self._runs.fits(run):
            return self._answer(chosen=run)
        if result.operations is None or self._plain.operations is None:
            tight = self._tight([])
            smallest, reason = (run, _UNRECORDED) if tight is None else (None, "")
            return self._answer(chosen=tight, smallest=smallest, reason=reason)
        start = self._bases.base(change, result, run)
        return self._combine(chain([start], offloaded if self._allowed.rounding else ()))

    def _offloaded_shards(self, changes: Iterable[Change]) -> Iterator[CheckpointingBase]:
        """Yield the script with its shards on the host, under each change under which it runs like that."""
        for change in changes:
            made = self._runs.make(change, 1.0, operations=True)
            if isinstance(made, ScriptEnd):
                self._runs.drop(change, why_run_failed(made))
            elif made[0].operations is not None:
                self._runs.models = made[0].models
                yield self._bases.base(change, *made)

    def _combine(self, starts: Iterable[CheckpointingBase]) -> ScriptPlan:
        """Change more about what does not fit; the next start is made if nothing fits with those before."""
        if (floor := self._bases.floor()) is not None and floor.needs.bytes > self._runs.budget:
            self._runs.budget = self._budget  # every plan is tight
        bases: list[CheckpointingBase] = []
        for start in starts:
            bases += self._search_roots(self._bases.roots(start))
            self._runs.chosen = self._divisions.divided_in_model([*bases, start], self._optimizer)
            if self._bases.optimizer_changes:
                self._try_every_block(bases)
                bases += self._search_roots(self._bases.roots_with_other_optimizers())
            if self._runs.chosen is not None:
                break
        rest = list(filter(self._may_fit, bases))
        if not self._refusal:
            bases += (rest := self._bases.to_offload(rest, hides=self._limiting_host() is not None))
        if rest and (self._runs.chosen is None or not self._refusal):
            self._runs.chosen = self._try_the_rest(rest)
        if (found := self._runs.chosen) is None or found.time > self._allowed.slowdown:
            tight = self._tight(bases)
            if tight is not None and (found is None or tight.time <= self._allowed.slowdown):
                return self._left_to_memfit(tight, bases, 0.0)
        if found is None:
            return self._no_plan(bases or [start])
        return self._left_to_memfit(found, bases, min(map(self._bound, bases)))

    def _left_to_memfit(self, found: PlanRun, bases: list[CheckpointingBase], bound: float) -> ScriptPlan:
        """Answer with the fastest plan that leaves the script's loop as it is; ``found`` if none fits."""
        chosen: PlanRun | None = found
        if is_made_by_loop(found.change):
            self._in_loop = None if self._divisions.only_in_model else found
            chosen = self._divisions.leave_loop(found, bases, self._ran, self._search)
            tried = any("optimizer_state" in base.change.plan for base in bases)
            if chosen is None and not tried:  # none was worth a run: the plan with another loop is faster
                bases = bases + self._search_roots(self._bases.roots_with_other_optimizers())
                found = self._runs.chosen or found
                chosen = self._divisions.leave_loop(found, bases, self._ran, self._search)
            if chosen is None or chosen.time > self._allowed.slowdown:
                chosen = self._in_loop or chosen
        if chosen is None:
            return self._no_plan(bases)
        if self._in_loop is None:
            self._divisions.try_in_loop(chosen, bases)
        return self._answer(chosen=chosen, bound=bound)

    def _search_roots(self, roots: Iterable[CheckpointingBase]) -> list[CheckpointingBase]:
        """Choose the fastest plan under some roots; return these, and the divisions of their batches."""
        found: list[CheckpointingBase] = []
        for root in roots:
            self._divisions.begin(root)
            added = [root]
            self._runs.chosen = self._search(added)
            found += added
        return found

    def _try_the_rest(self, bases: list[CheckpointingBase]) -> PlanRun | None:
        """Return a plan that fits, if one does, of bases in which recomputation alone is not enough."""
        self._divisions.left = []
        found = self._search(bases)
        if found is not None or self._runs.count >= _MOST_RUNS:
            return found
        return self._run_smallest(bases) or self._every_block(bases)

    def _run_smallest(self, bases: list[CheckpointingBase]) -> PlanRun | None:
        """Run what is predicted to need least, to say what is needed; return it if it fits all the same."""
        least = min(bases, key=lambda base: base.bracket.least_needs)
        reached = min((run.needs.bytes for run in self._runs.tried), default=least.run.needs.bytes)
        if self._refusal or least.bracket.least_needs >= reached:
            return None
        self._try(least, least.bracket.smallest)
        return self._best(least)

    def _tight(self, bases: list[CheckpointingBase]) -> PlanRun | None:
        """Return the fastest plan that fits the whole budget, if one does; search bases once more for it."""
        if self._runs.budget == self._budget:
            return None
        self._runs.budget, self._divisions.left = self._budget, []
        self._runs.chosen = min(filter(self._runs.fits, self._ran), key=lambda run: run.time, default=None)
        return self._search(bases) if bases else self._runs.chosen

    def _search(self, bases: list[CheckpointingBase]) -> PlanRun | None:
        """Return the fastest plan that fits, if one does; bases are added while they may pay."""
        while True:
            fitting = [run for run in (self._runs.chosen, *map(self._best, bases)) if run is not None]
            best = min(fitting, key=lambda run: run.time, default=None)
            self._offer()
            if self._runs.count >= _MOST_RUNS:
                return best
            worth = [each for each in bases if best is None or self._may_be_taken(each)]
            worth = list(filter(self._may_fit, worth))
            found = [] if self._refusal else [each for base in worth if (each := self._proposal(base))]
            fits = [each for each in found if each[0].bracket.may_fit(each[1])]
            likely = min(fits, key=_predicted, default=None)
            times = [run.time for run in fitting] + [_predicted(each) for each in fits]
            pays = bases[-1].run.time < min(times, default=float("inf")) - WORTH
            if self._divisions.left and bases[-1].update.needs.bytes <= self._budget and pays:
                bases.extend(self._divisions.make(bases[0], bases[-1]))
                continue
            smallest = min(found, key=lambda each: each[0].bracket.needs(each[1]), default=None)
            if likely is not None and (best is None or _predicted(likely) < best.time - WORTH):
                self._try(*likely)
            elif best is None and smallest is not None:
                self._try(*smallest)
            else:
                return best

    def _may_fit(self, base: CheckpointingBase) -> bool:
        """Return whether a base may fit, whatever is recomputed in it."""
        return base.update.needs.bytes <= self._runs.budget and self._bases.can_fit(base.change)

    def _best(self, base: CheckpointingBase) -> PlanRun | None:
        """Return the fastest run of a base that fits."""
        if self._runs.fits(base.run):
            return base.run
        return base.bracket.best[1] if base.bracket.best is not None else None

    def _proposal(self, base: CheckpointingBase) -> _Proposal | None:
        choice = None if self._runs.fits(base.run) else base.bracket.next()
        return None if choice is None else (base, choice)

    def _may_be_taken(self, base: CheckpointingBase) -> bool:
        """Return whether a plan of a base may fit in the time that is allowed."""
        return base.bracket.least <= self._allowed.slowdown

    def _bound(self, base: CheckpointingBase) -> float:
        """Return the time below which no plan of a base is that fits, should the loop divide its batches."""
        if not self._may_fit(base):
            return INFINITY
        time = base.run.time if self._runs.fits(base.run) else base.bracket.bound
        return time - self._runs.more_in_slices(base.change)

    def _try(self, base: CheckpointingBase, choice: CheckpointChoice) -> None:
        """Run a plan, and correct the model of its base."""
        change = checkpoint_choice_change(choice, self._optimizer, offload=base.offload)
        made = self._runs.make(base.change | change, base.bracket.time(choice))
        if isinstance(made, ScriptEnd):
            self._refusal = f"With {', '.join((*base.change.words, *change.words))}, {why_run_failed(made)}"
            return
        result, run = made
        self._runs.models = result.models
        base.bracket.add(choice, run)

    def _try_every_block(self, bases: list[CheckpointingBase]) -> None:
        """Checkpoint every block where the model predicts that nothing can fit: it may predict too much."""
        may_fit = [base for base in bases if self._may_fit(base)]
        left = self._runs.chosen is None and self._runs.count < _MOST_RUNS
        if left and may_fit and not any(base.bracket.has_run for base in bases):
            self._runs.chosen = self._every_block(may_fit)

    def _every_block(self, bases: list[CheckpointingBase]) -> PlanRun | None:
        """Checkpoint every block in the base that needs least; None if that does not fit, or was tried."""
        base = min(bases, key=lambda base: base.run.needs.bytes)
        if base.change in self._ran_in_blocks:
            return None
        self._ran_in_blocks.add(base.change)
        plan = base.change | block_checkpointing_policies(self._optimizer)[0]
        made = self._runs.make_for_time(plan, functools.partial(self._bases.relative, base.change))
        if isinstance(made, ScriptEnd) or not self._runs.fits(made[1]):
            return None
        self._runs.models = made[0].models
        return made[1]

    def policies(self) -> tuple[PlanRun, ...]:
        """Run the policies that people use; those that the script or its model refuses are left out."""
        if self._plain.operations is None:
            return ()
        tune, written = self._allowed.allocator, self._runs.written
        runs = PlanRuns(self._script.run, self._budget, tune=tune, written=written)
        unchanged = UNSHARDED if self._script.is_to_be_sharded(self._plain) else Change()
        for policy in block_checkpointing_policies(self._optimizer):
            plan = unchanged | policy
            runs.make_for_time(plan, functools.partial(self._bases.relative, plan))
        return tuple(runs.tried)

    def _no_plan(self, bases: list[CheckpointingBase]) -> ScriptPlan:
        """Answer that no plan fits: because none can, or because none that ran does."""
        floor = self._bases.floor()
        if floor is not None and floor.needs.bytes > self._budget:
            return self._answer_below(floor, min(self._ran, key=lambda run: run.needs.bytes))
        self._run_smallest(bases)
        smallest = min(self._ran, key=lambda run: run.needs.bytes)
        ways = ways_tried(smallest, self._runs.tried)
        reason = self._refusal or why_smallest_exceeds_budget(smallest, ways)
        return self._answer(smallest=smallest, reason=reason)

    def _completed(self, answer: ScriptPlan) -> ScriptPlan:
        sent = bytes_sent_before_and_under(answer, self._script.ranks)
        return self._divisions.completed(replace(answer, in_loop=self._in_loop, sent=sent), self._ran)


def _predicted(proposal: _Proposal) -> float:
    """Return the time that is predicted for a proposal."""
    base, choice = proposal
    return base.bracket.time(choice)
