"""Which divisions of batches a search makes: in 2, 4, ... parts, while smaller parts may be enough.

allocated
  │ ●            at each moment, a part that does not depend on the batch, and one in proportion to 1 / parts.
  │    ●         The peak is the largest of such sums: as a function of 1 / parts, it is never below the line
  │         ●    through two of its points.
  └───────────── parts
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from memfit.analysis.trial_result import TrialResult, why_run_failed
from memfit.planning.batch_size_changes import (
    batch_division_changes,
    process_bytes_independent_of_batch,
    slice_changes,
    why_batches_are_indivisible,
    with_facts_on_samples,
)
from memfit.planning.bracket_checkpoint_choices import WORTH
from memfit.planning.carry_out_in_slices import SlicedPlans, dimension_of_samples
from memfit.planning.checkpointing_bases import CheckpointingBase, CheckpointingBases
from memfit.planning.mixed_integer_solver import INFINITY
from memfit.planning.optimizer_state_changes import makes_updates_in_backward, optimizer_state_bytes_saved
from memfit.planning.run_changes_on_ghost import PlanRuns, is_made_by_loop
from memfit.planning.sample_independence import (
    SampleComparison,
    compare_steps_of_parts,
    why_loss_is_a_sum,
)
from memfit.planning.strategy_and_allocator_changes import AllowedChanges, block_checkpointing_policies
from memfit.records import Change, PlanRun, ScriptEnd, ScriptPlan
from memfit.units import format_gib

_PAYS = 0.95
"""Slices of half the size are tried where the last ones have left no more than this of what a run needs."""

_WORTH_MORE_RUNS = 0.05
"""Of a step: what a plan must be able to save to be searched once more, which takes several runs."""


class BatchDivisionsToTry:
    """The divisions that are left for one base after the other.

    Args:
        plain: the script as written.
        runs: of the search.
        bases: of the search.
        budget: bytes of the process that no plan may need more of.
        allowed: what a plan may change.
    """

    def __init__(
        self,
        plain: TrialResult,
        runs: PlanRuns,
        bases: CheckpointingBases,
        budget: int,
        allowed: AllowedChanges,
    ) -> None:
        self._runs, self._bases, self._budget = runs, bases, budget
        step = plain.operations
        loop_draws = step is not None and step.samples is not None and step.samples.random
        draws = step is not None and any(each.random for each in step.forward)
        self._divide = partial(
            batch_division_changes, plain.trace, draws=draws or loop_draws, loop_draws=loop_draws
        )
        self._ways = self._divide() if allowed.rounding else []
        self._indivisible = (
            why_batches_are_indivisible(plain.trace) if allowed.rounding and not self._ways else ""
        )
        self.only_in_model = ""
        """Why only the model's call can divide batches, not the loop, as a clause."""
        if self._ways and step is not None and (why := why_loss_is_a_sum(step)):
            self._leave_to_model(why)
        self.left: list[Change] = []
        """Those that may be made of the base, largest parts first."""
        self.why_no_more = ""
        """Why batches are not divided, or no further, as a clause."""
        self._sliced = SlicedPlans(runs, budget)
        self._slices = slice_changes(plain.trace, step) if allowed.rounding else []
        """Where nothing sets the size of batches, which only the model's call can divide then."""
        self._are_independent = False
        """Whether two batches, one half as large as the other, have shown that samples are."""
        self._alone: dict[int, PlanRun] = {}
        """By parts: runs with divided batches and no other change."""

    def _leave_to_model(self, why: str) -> None:
        """Divide batches by slices only, which keep the rows of the batch and the loop's own loss."""
        self.only_in_model = why
        self._ways = self._divide(by_options=False)

    def left_to_memfit(self, runs: Iterable[PlanRun]) -> list[PlanRun]:
        """Return those runs that are plans: where only the model can divide batches, none by the loop is."""
        return [run for run in runs if not (self.only_in_model and run.change.micro_batches)]

    def _need_whole_batches(self) -> None:
        if self._bases.floors is not None:
            self._bases.floors.parts = 1

    def leave_loop(
        self,
        found: PlanRun,
        bases: list[CheckpointingBase],
        ran: Sequence[PlanRun],
        search: Callable[[list[CheckpointingBase]], PlanRun | None],
    ) -> PlanRun | None:
        """Return the fastest plan that fits and leaves the loop as it is, if there is one.

        Args:
            found: the fastest plan that fits.
            bases: of the search; smaller parts are made where slices need more than micro-batches, and
                where all that fit are tight.
            ran: before the plans that were tried.
            search: runs the fastest plans of bases within the budget of the runs: less than it is, by what
                slices needed more than the micro-batches of a base.
        """

        def fastest() -> PlanRun:
            return self._sliced.fastest(found, [*ran, *self._runs.tried])

        def recompute(base: CheckpointingBase) -> PlanRun:
            """Search a base once more, with less memory: slices need the rest."""
            more, left = self._sliced.more[base.change.parts], self.left
            searched.add(id(base))
            self._runs.chosen = chosen if leaves_loop() else None
            self.left = []
            self._runs.budget -= more
            search([base])
            self._runs.budget += more
            self.left = left
            return fastest()

        def leaves_loop() -> bool:
            return not is_made_by_loop(chosen.change) and self._runs.fits(chosen)

        searched: set[int] = set()
        chosen = fastest()
        while self.left and not self._sliced.refused and not leaves_loop():
            if id(bases[-1]) not in searched and self._is_recomputation_faster(bases[0], bases[-1]):
                chosen = recompute(bases[-1])
            else:
                bases += self.make(bases[0], bases[-1])
                chosen = fastest()
        self.left = []
        for base in bases:
            is_worth = is_made_by_loop(chosen.change) or base.run.time < chosen.time - _WORTH_MORE_RUNS
            if self._sliced.more.get(base.change.parts) and id(base) not in searched and is_worth:
                chosen = recompute(base)
        self._runs.chosen = None if is_made_by_loop(chosen.change) else chosen
        return search([base for base in bases if base.change.parts == 1])

    def _is_recomputation_faster(self, whole: CheckpointingBase, last: CheckpointingBase) -> bool:
        """Return whether slices are predicted to fit if more is recomputed, in less time than smaller ones.

        Smaller parts take more time in proportion to their number.
        """
        more, parts = self._sliced.more.get(last.change.parts), last.change.parts
        if not more or parts <= whole.change.parts:
            return False
        self._runs.budget -= more
        choice = last.bracket.next()
        self._runs.budget += more
        each = (last.run.time - whole.run.time) / (parts - whole.change.parts)
        return choice is not None and last.bracket.time(choice) < last.run.time + each * (
            self.left[0].parts - parts
        )

    def try_in_loop(self, chosen: PlanRun, bases: Sequence[CheckpointingBase]) -> None:
        """Run smaller micro-batches until some fit, where the loop would save far more time than memfit can.

        Args:
            chosen: the fastest plan that leaves the loop as it is.
            bases: of the search.
        """
        divided = [each for each in bases if is_made_by_loop(each.change)]
        last = next((each for each in divided[::-1] if "optimizer_state" not in each.change.plan), None)
        if last is None or self.only_in_model:
            return
        why = self.why_no_more
        self.left = [way for way in self._ways if way.parts > last.change.parts]
        while self.left and not self._runs.fits(last.run):
            if self._runs.made_by_loop(last.run).time > chosen.time - _WORTH_MORE_RUNS:
                break
            (last,) = self.make(bases[0], last) or (last,)
        self.left, self.why_no_more = [], why

    def divided_in_model(self, bases: Iterable[CheckpointingBase], optimizer: int | None) -> PlanRun | None:
        """Return the fastest plan that fits, by slices if nothing sets the size of batches.

        Every block is checkpointed as well.

        Args:
            bases: of the search.
            optimizer: whose models a plan changes.
        """
        least, chosen = min(bases, key=lambda base: base.run.needs.bytes), self._runs.chosen
        for more in (Change(), block_checkpointing_policies(optimizer)[0]):
            chosen = self._in_slices(least, more, chosen)
        return chosen

    def _in_slices(self, whole: CheckpointingBase, more: Change, chosen: PlanRun | None) -> PlanRun | None:
        """Return the fastest plan that fits: the one so far, or slices with another change."""
        before = whole.run
        for slices in self._slices:
            count = slices.plan["batch_slices"]["count"]
            least = 1.0 + self._runs.again * (count - 1) / count
            if chosen is not None and chosen.time <= least + WORTH:
                break
            plan = whole.change | slices | more
            if not self._bases.can_fit(plan):
                break
            made = self._runs.make_for_time(plan, partial(self._bases.relative, plan))
            if isinstance(made, ScriptEnd):
                self.why_no_more = self._indivisible = why_run_failed(made)
                self._runs.drop(plan, self.why_no_more)
                self._slices = []
                self._need_whole_batches()
                break
            run = made[1]
            self.why_no_more = self._indivisible = ""
            if self._runs.fits(run):
                self._runs.models = made[0].models
                return min(filter(None, (chosen, run)), key=lambda each: each.time)
            if run.needs.bytes > _PAYS * before.needs.bytes:
                break
            before = run
        return chosen

    def completed(self, answer: ScriptPlan, ran: Iterable[PlanRun]) -> ScriptPlan:
        """Return an answer with why batches are not divided; what the loop divides has the time of that.

        Args:
            answer: of the search.
            ran: before the plans that were tried.
        """
        made_by_loop = self._runs.made_by_loop
        tried = tuple(map(made_by_loop, self.left_to_memfit(answer.tried)))
        smallest = None if answer.smallest is None else made_by_loop(answer.smallest)
        undivided = self.why_no_more or self.only_in_model
        in_loop = answer.in_loop or self._faster_in_loop(answer.chosen, ran)
        in_loop = None if in_loop is None else made_by_loop(in_loop)
        # Slices of other sizes have not run.
        least = 1.0 + self._runs.again / 2 if self._slices else INFINITY
        bound = min(answer.bound, least, INFINITY if in_loop is None else in_loop.time)
        return replace(
            answer, undivided=undivided, tried=tried, smallest=smallest, bound=bound, in_loop=in_loop
        )

    def _faster_in_loop(self, chosen: PlanRun | None, ran: Iterable[PlanRun]) -> PlanRun | None:
        """Return the fastest plan that fits and takes less time for a change of the loop, if one ran."""
        if chosen is None or self.only_in_model:
            return None
        divided = [run for run in (*ran, *self._runs.tried) if is_made_by_loop(run.change)]
        fitting = [run for run in divided if self._runs.fits(run)]
        faster = [run for run in fitting if self._runs.made_by_loop(run).time < chosen.time - WORTH]
        return min(faster, key=lambda run: self._runs.made_by_loop(run).time, default=None)

    def begin(self, root: CheckpointingBase) -> None:
        """Begin with a base with whole batches: find the divisions that may be enough for it.

        Those that did not fit without its change of the optimizer may fit by what that saves.
        """
        self.left = []
        if makes_updates_in_backward(root.change):
            return
        self.why_no_more = self._indivisible
        for number, way in enumerate(self._ways):
            alone = self._alone.get(way.parts)
            if (
                alone is None
                or alone.needs.bytes - optimizer_state_bytes_saved(root.change, alone) <= self._runs.budget
            ):
                self.left = self._ways[number:]
                return
        self.left = self._ways[-1:]

    def make(self, whole: CheckpointingBase, last: CheckpointingBase) -> list[CheckpointingBase]:
        """Run the script with the next smaller batches; return it as a base, or nothing if it must not be.

        Args:
            whole: the base that was begun with.
            last: the same, or the one made last of it.
        """
        division = self.left.pop(0)
        divided, plan = division.micro_batches, whole.change | division
        made = self._runs.make(plan, partial(self._bases.relative, plan), operations=True)
        operations, samples = None, SampleComparison()
        if isinstance(made, ScriptEnd):
            fault = why_run_failed(made)
        elif (operations := made[0].operations) is None:
            fault = f"memfit saw no two updates of {plan.parts} batches each (the script ends before)"
        else:
            samples = compare_steps_of_parts(
                whole.operations, operations, plan.parts, independent=self._are_independent
            )
            fault = samples.why
            may_slice = not self._are_independent and not samples.in_model
            if fault and may_slice and divided is not None and not divided.by_engine:
                self._leave_to_model(fault)
                if divided.by_option:  # the loop divides batches then
                    self._runs.tried.pop()
                    self.left = self._ways
                    return []
            fault = samples.in_model if self.only_in_model else fault
        if fault or isinstance(made, ScriptEnd) or operations is None:
            self._ways = [way for way in self._ways if way.parts < division.parts]
            self.left, self._indivisible, self.why_no_more = [], fault, fault
            if not self._are_independent:
                self._need_whole_batches()
            if not isinstance(made, ScriptEnd):
                self._runs.tried.pop()
            return []
        self._are_independent = True
        dim = dimension_of_samples(whole.operations.samples, operations.samples, plan.parts)
        plan = with_facts_on_samples(plan, samples.assumed, dim)
        change = replace(made[1].change, micro_batches=plan.micro_batches)
        run = self._runs.tried[-1] = replace(made[1], change=change)
        base = self._bases.base(plan, made[0], run)
        if whole.change.plan.get("optimizer_state") is None:
            self._alone.setdefault(plan.parts, base.run)
        self._end_if_hopeless(base, last)
        return [base]

    def _end_if_hopeless(self, base: CheckpointingBase, last: CheckpointingBase) -> None:
        """Leave out smaller parts if they can need no less than is too much, whatever is recomputed."""
        run, parts = base.run, base.change.parts
        least = process_bytes_independent_of_batch(run)
        if last.change.parts > 1 and run.allocated and last.run.allocated:
            rise = (last.run.allocated - run.allocated) / (1 / last.change.parts - 1 / parts)
            outside = run.needs.bytes - run.reserved.bytes
            least = max(least, outside + int(run.allocated - rise / parts))
        # Once a plan fits tightly, smaller parts are worth a run only if they may fit without being tight.
        is_one_tight = any(each.needs.bytes <= self._budget for each in self._runs.tried)
        if self.left and least > (self._runs.budget if is_one_tight else self._budget):
            self.left = []
            self.why_no_more = f"smaller parts would need at least {format_gib(least)}, too"
