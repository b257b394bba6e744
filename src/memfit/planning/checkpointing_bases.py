"""The script under changes that an outer loop makes: what to recompute under each is still to be chosen.

    as written ── other precisions, a fused optimizer ── the optimizer in the backward, its state elsewhere
       │
    in 2, 4, ... micro-batches

Each has run on the ghost, operation by operation.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.analysis.trial_result import TrialResult, why_run_failed
from memfit.planning.batch_size_changes import batch_division_changes, slice_changes
from memfit.planning.bracket_checkpoint_choices import CheckpointChoiceBracket
from memfit.planning.choose_checkpointing import CheckpointChooser
from memfit.planning.memory_floor import MemoryFloor, MemoryFloors, memory_floor_of_updates
from memfit.planning.mixed_integer_solver import INFINITY
from memfit.planning.optimizer_state_changes import (
    OptimizerChangesToTry,
    bytes_of_category_at_peak,
    has_all_optimizer_settings_of,
    least_time_with_state_offloaded,
    offloads_state,
    optimizer_state_changes,
)
from memfit.planning.run_changes_on_ghost import (
    PlannedScript,
    PlanRuns,
    forward_and_backward_seconds,
    is_made_by_loop,
    seconds_to_run_model_again,
)
from memfit.planning.shardings import own_sharding_changes, with_unsharded_module_names
from memfit.planning.strategy_and_allocator_changes import FUSED_OPTIMIZER, PRECISIONS, AllowedChanges
from memfit.records import Category, Change, Phase, PlanRun, ScriptEnd, StepOperations


@dataclass(frozen=True, slots=True)
class CheckpointingBase:
    """The script with batches of one size; what to recompute in it is still to be chosen."""

    change: Change
    operations: StepOperations
    run: PlanRun
    """With nothing recomputed."""
    update: MemoryFloor
    """What its updates need after the backward, whatever is recomputed and however small batches are."""
    bracket: CheckpointChoiceBracket
    offload: bool = False
    """Whether the inputs of recomputed modules wait on the host."""


class CheckpointingBases:
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
        self._made: list[CheckpointingBase] = []
        self._refused: list[Change] = []
        offloads = any(own_sharding_changes(plain.sharding_calls, offloads=True))
        ways = batch_division_changes(plain.trace, draws=False)
        counts = [each.plan["batch_slices"]["count"] for each in slice_changes(plain.trace, plain.operations)]
        parts = max((*(way.parts for way in ways), *counts), default=1)
        self.floors = (
            None
            if script.is_to_be_sharded(plain) or offloads
            else MemoryFloors(plain, parts if allowed.rounding else 1)
        )
        """None if the shards that are to be made are not known, or the script's own may leave the GPU."""
        self.optimizer_changes = optimizer_state_changes(allowed) if script.ranks == 1 else ()
        """None with several ranks, which reduce gradients before an update."""
        self._starts: list[PlanRun] = []
        """The script without any change of these."""
        self._least: CheckpointingBase
        """Of the last start's roots, the one that needs least."""
        self._passes = 0.0
        """Seconds of the operations of forward and backward as written."""
        if plain.operations is not None:
            self._passes = forward_and_backward_seconds(plain.operations, script.seconds)
            runs.again = seconds_to_run_model_again(plain.operations, script.seconds) / self.step

    @property
    def step(self) -> float:
        """Seconds of a step as written: of its operations alone where the time of the step is not known."""
        return self._passes if self._runs.written is None else self._runs.written.seconds

    def base(self, plan: Change, result: TrialResult, run: PlanRun) -> CheckpointingBase:
        """Return the base that a run is, whose operations were recorded."""
        operations = result.operations
        if operations is None:
            raise AssertionError  # the caller looks
        if self._plain.operations is not None:
            operations = with_unsharded_module_names(self._plain.operations, operations)
        chooser = CheckpointChooser(
            operations,
            self._script.seconds,
            host=self._script.host,
            in_parts=not is_made_by_loop(plan),
        )
        made = CheckpointingBase(
            plan,
            operations,
            run,
            memory_floor_of_updates(result),
            CheckpointChoiceBracket(chooser, self._runs, run, self.step),
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
        plans = [Change()]
        plans += [
            change
            for change in self.optimizer_changes
            if not any(has_all_optimizer_settings_of(change, each) for each in self._refused)
        ]
        plans += [PRECISIONS[name] | plan for name in self._allowed.precisions for plan in plans]
        found, needs = [], attrgetter("needs.bytes")
        for plan in plans:
            updates = [base.update for base in self._made if _kind(base.change) == _kind(plan)]
            least = self.floors.under(plan)
            found.append(max(least, min(updates, key=needs, default=least), key=needs))
        return min(found, key=needs)

    def roots(self, start: CheckpointingBase) -> Iterator[CheckpointingBase]:
        """Yield the script with whole batches, under changes that lower its peak, until a plan is chosen.

        Under each of them, every operation takes no more time.
        """
        self._starts.append(start.run)
        roots = [start]
        for name in self._allowed.precisions:
            plan = start.change | PRECISIONS[name]
            lower = self._lower(start, plan) if self.can_fit(plan) else None
            roots += [lower] if isinstance(lower, CheckpointingBase) else []
        roots.sort(key=lambda base: base.run.needs.bytes)
        roots[0] = self._least = self._fused(roots[0])
        for root in roots:
            if self._runs.chosen is None and self.can_fit(root.change):
                yield root

    def roots_with_other_optimizers(self) -> Iterator[CheckpointingBase]:
        """Yield the last start's root that needs least, under each change of the optimizer worth a run."""
        optimizer = None if self._plain.operations is None else self._plain.operations.optimizer
        changes = OptimizerChangesToTry(
            self._starts[-1], self._allowed, self._runs.budget, self._least_time_with_state_offloaded
        )
        while change := changes.next(self._runs.tried, self._runs.chosen):
            plan = self._least.change | replace(change, optimizer=optimizer)
            made = self._lower(self._least, plan) if self.can_fit(plan) else None
            if isinstance(made, CheckpointingBase):
                yield self._fused(made)
            elif made is not None:
                changes.refuse(change)
                self._refused.append(change)

    def _fused(self, base: CheckpointingBase) -> CheckpointingBase:
        """Return a base with fused optimizers, whose updates need no temporaries, if that may make it fit."""
        update = base.update.needs.bytes
        needs_most = base.run.place.phase is Phase.OPTIMIZER or update > self._runs.budget
        without = update - base.update.bytes_of(CATEGORY_NAMES[Category.TEMPORARY])
        if not (self._allowed.rounding and needs_most and without <= self._budget):
            return base
        fused = self._lower(base, base.change | FUSED_OPTIMIZER)
        return fused if isinstance(fused, CheckpointingBase) else base

    def _least_time_with_state_offloaded(self) -> float:
        written = self._runs.written
        busy = self.step if written is None else written.gpu_seconds
        return least_time_with_state_offloaded(self.step, busy, self._seconds_to_copy_state())

    def _seconds_to_copy_state(self) -> float:
        """Return the seconds of copying the optimizer's state to the host and back: both at the same time."""
        state = max(
            bytes_of_category_at_peak(run, Category.OPTIMIZER_STATE)
            for run in (*self._starts, *self._runs.tried)
        )
        return self._script.copy(state) / 2

    def _lower(self, base: CheckpointingBase, plan: Change) -> CheckpointingBase | ScriptEnd | None:
        """Run the script under a change; return it as a base, or nothing if it needs no less than another."""
        made = self._runs.make(plan, functools.partial(self.relative, plan), operations=True)
        if isinstance(made, ScriptEnd):
            self._runs.drop(plan, why_run_failed(made))
            return made
        if made[0].operations is None:
            return None
        lower = self.base(plan, made[0], made[1])
        needs = lower.run.needs.bytes, lower.update.needs.bytes
        if needs[0] >= base.run.needs.bytes and needs[1] >= base.update.needs.bytes:
            return None
        self._runs.models = made[0].models
        return lower

    def relative(self, plan: Change, result: TrialResult) -> float:
        """Return the time of forward and backward of a run, relative to the script as written.

        It counts where the time of whole steps is not known.
        """
        if result.operations is None or not self._passes:
            return INFINITY
        passes = plan.parts * forward_and_backward_seconds(result.operations, self._script.seconds)
        copies = self._seconds_to_copy_state() / self.step if offloads_state(plan) else 0.0
        return passes / self._passes + self._runs.more_in_slices(plan) + copies

    def to_offload(self, bases: Sequence[CheckpointingBase], *, hides: bool) -> list[CheckpointingBase]:
        """Return bases in which the inputs of what is recomputed wait on the host, where that may pay.

        Args:
            bases: some that may fit.
            hides: whether a host that limits the step hides the copies: then it may pay, with whole batches,
                though a plan is chosen. In parts, the host issues each operation once more.
        """
        if self._runs.chosen is not None:
            bases = [base for base in bases if hides and base.change.parts == 1]
        return [self._offloading(base) for base in bases]

    def _offloading(self, base: CheckpointingBase) -> CheckpointingBase:
        """Return a base in which the inputs of what is recomputed wait on the host."""
        in_parts = not is_made_by_loop(base.change)
        chooser = CheckpointChooser(
            base.operations,
            self._script.seconds,
            self._script.copy,
            self._script.host,
            in_parts=in_parts,
        )
        bracket = CheckpointChoiceBracket(chooser, self._runs, base.run, self.step)
        return replace(base, bracket=bracket, offload=True)


def _kind(plan: Change) -> dict[str, object]:
    """Return what a plan's updates depend on."""
    return {name: plan.plan.get(name) for name in ("precision", "optimizer_state")}
