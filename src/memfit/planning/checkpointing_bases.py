"""The script under changes that an outer loop makes: what to recompute under each is still to be chosen.

    as written ── other precisions, a fused optimizer ── the optimizer in the backward, its state elsewhere
       │
    in 2, 4, ... micro-batches

Each has run on the ghost, operation by operation.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.analysis.trial_result import TrialResult, why_run_failed
from memfit.planning.batch_size_changes import batch_divisions
from memfit.planning.bracket_checkpoint_choices import ChoiceBracket
from memfit.planning.choose_checkpointing import CheckpointChooser
from memfit.planning.memory_floor import MemoryFloor, MemoryFloors, floor_of_updates
from memfit.planning.optimizer_changes import (
    OptimizerChangesToTry,
    bytes_of_category_at_peak,
    has_all_settings_of,
    offloads_state,
    optimizer_changes,
)
from memfit.planning.run_changes_on_ghost import PlannedScript, PlanRuns, step_seconds
from memfit.planning.script_changes import FUSED_OPTIMIZER, PRECISIONS, AllowedChanges, precision_change
from memfit.planning.shardings import with_unsharded_names
from memfit.records import Category, Change, Phase, PlanRun, ScriptEnd, StepOperations


@dataclass(frozen=True, slots=True)
class PlanBase:
    """The script with batches of one size; what to recompute in it is still to be chosen."""

    change: Change
    operations: StepOperations
    run: PlanRun
    """With nothing recomputed."""
    update: MemoryFloor
    """What its updates need after the backward, whatever is recomputed and however small batches are."""
    bracket: ChoiceBracket
    offload: bool = False
    """Whether the inputs of recomputed modules wait on the host."""
    copies: float = 0.0
    """Time of copies of shards in each micro-batch, relative to a step of the script as written."""


class PlanBases:
    """Makes bases.

    Args:
        script: the script.
        plain: its run as written.
        runs: which make the bases.
        budget: bytes of the process that no plan may need more of.
        allowed: what a plan may change.
    """

    def __init__(
        self, script: PlannedScript, plain: TrialResult, runs: PlanRuns, budget: int, allowed: AllowedChanges
    ) -> None:
        self._script, self._plain, self._runs = script, plain, runs
        self._budget, self._allowed = budget, allowed
        self._made: list[PlanBase] = []
        self._refused: list[Change] = []
        parts = max((way.parts for way in batch_divisions(plain.trace, draws=False)), default=1)
        self.floors = (
            None if script.is_to_be_sharded(plain) else MemoryFloors(plain, parts if allowed.rounding else 1)
        )
        """None if the shards that are to be made are not known."""
        self._starts: list[PlanRun] = []
        """The script without any change of these."""
        self.step = 0.0
        """Seconds of a step as written."""
        if plain.operations is not None:
            self.step = step_seconds(plain.operations, script.seconds)

    def base(self, plan: Change, result: TrialResult, run: PlanRun) -> PlanBase:
        """Return the base that a run is, whose operations were recorded."""
        operations = result.operations
        if operations is None:
            raise AssertionError  # the caller looks
        if self._plain.operations is not None:
            operations = with_unsharded_names(self._plain.operations, operations)
        chooser = CheckpointChooser(operations, self._script.seconds)
        made = PlanBase(
            plan,
            operations,
            run,
            floor_of_updates(result),
            ChoiceBracket(chooser, self._runs, run, self.step),
        )
        self._made.append(made)
        return made

    def can_fit(self, plan: Change) -> bool:
        """Return whether the floor of a plan is within the budget, as far as it is known."""
        return self.floors is None or self.floors.under(plan).needs.bytes <= self._budget

    def floor(self) -> MemoryFloor | None:
        """Return the floor of all plans that the script has not refused; None if it is not known.

        Where updates ran under a plan's change of precision and optimizer, what they needed counts.
        """
        if self.floors is None:
            return None
        changes = optimizer_changes(self._allowed) if self._script.ranks == 1 else ()
        plans = [Change()]
        plans += [
            change
            for change in changes
            if not any(has_all_settings_of(change, each) for each in self._refused)
        ]
        plans += [
            precision_change(name, PRECISIONS[name]) | plan
            for name in self._allowed.precisions
            for plan in plans
        ]
        found = []
        for plan in plans:
            updates = [base.update for base in self._made if _kind(base.change) == _kind(plan)]
            least = self.floors.under(plan)
            found.append(max(least, min(updates, key=_bytes_of, default=least), key=_bytes_of))
        return min(found, key=_bytes_of)

    def roots(
        self, start: PlanBase, chosen: Callable[[], PlanRun | None], before_optimizers: Callable[[], None]
    ) -> Iterator[PlanBase]:
        """Yield the script with whole batches, under changes that lower its peak, while one may be chosen.

        First those in which each operation takes no more time; then those of the optimizer.

        Args:
            start: the script with whole batches.
            chosen: returns the fastest plan so far that fits.
            before_optimizers: called before the first change of the optimizer: it may choose a plan.
        """
        self._starts.append(start.run)
        roots = [start]
        for name in self._allowed.precisions:
            plan = start.change | precision_change(name, PRECISIONS[name])
            lower = self._lower(start, plan) if self.can_fit(plan) else None
            roots += [lower] if isinstance(lower, PlanBase) else []
        roots.sort(key=lambda base: base.run.needs.bytes)
        least = roots[0]
        roots[0] = least = self._fused(least)
        for root in roots:
            if chosen() is None and self.can_fit(root.change):
                yield root
        if self._script.ranks == 1 and optimizer_changes(self._allowed):  # several reduce gradients before
            before_optimizers()
            yield from self._with_other_optimizers(start, least, chosen)

    def _with_other_optimizers(
        self, start: PlanBase, least: PlanBase, chosen: Callable[[], PlanRun | None]
    ) -> Iterator[PlanBase]:
        """Yield a base under changes of the optimizer.

        Args:
            start: the script without any change.
            least: of those in which each operation takes no more time, the one that needs least.
            chosen: as for ``roots``.
        """
        optimizer = None if self._plain.operations is None else self._plain.operations.optimizer
        changes = OptimizerChangesToTry(start.run, self._allowed, self._runs.budget, self._copies_of_state)
        while change := changes.next(self._runs.tried, chosen()):
            plan = least.change | replace(change, optimizer=optimizer)
            made = self._lower(least, plan) if self.can_fit(plan) else None
            if isinstance(made, PlanBase):
                yield self._fused(made)
            elif made is not None:
                changes.refuse(change)
                self._refused.append(change)

    def _fused(self, base: PlanBase) -> PlanBase:
        """Return a base with fused optimizers, whose updates need no temporaries, if that may make it fit."""
        update = base.update.needs.bytes
        needs_most = base.run.place.phase is Phase.OPTIMIZER or update > self._runs.budget
        without = update - base.update.bytes_of(CATEGORY_NAMES[Category.TEMPORARY])
        if not (self._allowed.rounding and needs_most and without <= self._budget):
            return base
        fused = self._lower(base, base.change | FUSED_OPTIMIZER)
        return fused if isinstance(fused, PlanBase) else base

    def _copies_of_state(self) -> float:
        """Return the time of copying the optimizer's state to the host and back, as ``PlanBase.copies``."""
        state = max(
            bytes_of_category_at_peak(run, Category.OPTIMIZER_STATE)
            for run in (*self._starts, *self._runs.tried)
        )
        return self._script.copy(state) / self.step

    def _lower(self, base: PlanBase, plan: Change) -> PlanBase | ScriptEnd | None:
        """Run the script under a change; return it as a base, or nothing if it needs no less than another."""
        relative = functools.partial(self.relative, plan, copies=base.copies)
        made = self._runs.make(plan, relative, operations=True)
        if isinstance(made, ScriptEnd):
            self._runs.drop(plan, why_run_failed(made))
            return made
        if made[0].operations is None:
            return None
        lower = replace(self.base(plan, made[0], made[1]), copies=base.copies)
        needs = lower.run.needs.bytes, lower.update.needs.bytes
        if needs[0] >= base.run.needs.bytes and needs[1] >= base.update.needs.bytes:
            return None
        self._runs.models = made[0].models
        return lower

    def relative(self, plan: Change, result: TrialResult, copies: float = 0.0) -> float:
        """Return the time of a recorded run's step, relative to the script as written; copies as in Base."""
        if result.operations is None:
            return float("inf")
        step = plan.parts * (step_seconds(result.operations, self._script.seconds) / self.step + copies)
        return step + (self._copies_of_state() if offloads_state(plan) else 0.0)

    def offloading(self, base: PlanBase) -> PlanBase:
        """Return a base in which the inputs of what is recomputed wait on the host."""
        chooser = CheckpointChooser(base.operations, self._script.seconds, self._script.copy)
        bracket = ChoiceBracket(chooser, self._runs, base.run, self.step)
        return replace(base, bracket=bracket, offload=True)


def _bytes_of(floor: MemoryFloor) -> int:
    return floor.needs.bytes


def _kind(plan: Change) -> dict[str, object]:
    """Return what a plan's updates depend on."""
    return {name: plan.plan.get(name) for name in ("precision", "optimizer_state")}
