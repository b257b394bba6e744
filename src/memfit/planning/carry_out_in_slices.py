"""Batch slices in place of the micro-batches that a script's loop would have to make.

A search divides batches by the script's own batch size. Where no option of the script sums the gradients of
the parts, ``BatchSlices`` divide the same batches inside the model's call, and the loop stays as it is. They
also hold the outputs of the whole batch and what the loss makes of them: they have run on the ghost before a
plan has them.
"""

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from memfit.analysis.trial_result import why_run_failed
from memfit.planning.run_changes_on_ghost import PlanRuns
from memfit.records import Change, PlanRun, ScriptEnd, StepInputs


class SlicedPlans:
    """The plans of a search with slices in place of micro-batches that the loop makes.

    Args:
        runs: of the search.
        budget: bytes of the process.
    """

    def __init__(self, runs: PlanRuns, budget: int) -> None:
        self._runs, self._budget = runs, budget
        self._made: dict[Change, PlanRun] = {}
        self.more: dict[int, int] = {}
        """By parts: bytes that slices needed more than micro-batches, where they did not fit."""
        self.refused = False
        """Whether the model's batches cannot be divided inside its call."""

    def fastest(self, found: PlanRun, ran: Iterable[PlanRun]) -> PlanRun:
        """Return the fastest plan that fits and leaves the loop as it is; ``found`` if there is none.

        Args:
            found: the fastest plan that fits.
            ran: all plans that ran.
        """
        fit: list[PlanRun] = []
        tight: list[PlanRun] = []
        fitting = [run for run in ran if run.needs.bytes <= self._budget and run.time >= found.time]
        for plan in sorted({id(each): each for each in (found, *fitting)}.values(), key=attrgetter("time")):
            if fit and plan.time >= min(run.time for run in fit):
                break
            divided = plan.change.micro_batches
            if divided is None or not divided.by_hand:
                (fit if self._runs.fits(plan) else tight).append(plan)
                continue
            self.refused |= divided.dim is None
            if self.refused or plan.needs.bytes + self.more.get(divided.count, 0) > self._budget:
                continue
            sliced = self._run(plan)
            if sliced is None:
                self.refused = True
            elif self._runs.fits(sliced):
                fit.append(self._with_more_kept(sliced, plan))
            else:
                self.more[divided.count] = sliced.needs.bytes - plan.needs.bytes
                tight += [sliced] * (sliced.needs.bytes <= self._budget)
        return min(fit or tight, key=attrgetter("time"), default=found)

    def _run(self, plan: PlanRun, kept: int = 1) -> PlanRun | None:
        change, count = change_to_slices(plan.change, kept), plan.change.parts
        if change not in self._made:
            time = self._runs.made_by_loop(plan).time + self._runs.again * (count - kept) / count
            made = self._runs.make(change, time)
            if isinstance(made, ScriptEnd):
                self._runs.drop(change, why_run_failed(made))
                return None
            self._runs.models, self._made[change] = made[0].models, made[1]
        return self._made[change]

    def _with_more_kept(self, sliced: PlanRun, plan: PlanRun) -> PlanRun:
        """Return a plan with slices in which as many are kept as the room has, if each saves as much."""
        saved = sum(term.figure.bytes for term in sliced.terms if "activations" in term.name)
        room = self._runs.budget - sliced.needs.bytes
        kept = min(plan.change.parts - 1, 1 + room // saved) if saved and self._runs.again else 1
        more = self._run(plan, kept) if kept > 1 else None
        return more if more is not None and self._runs.fits(more) else sliced


def change_to_slices(change: Change, kept: int = 1) -> Change:
    """Return a change in which slices take the place of its micro-batches."""
    divided = change.micro_batches
    if divided is None:
        return change
    settings = {"count": divided.count} | ({"kept": kept} if kept > 1 else {})
    settings |= {"dim": divided.dim} if divided.dim else {}
    plan = {name: given for name, given in change.plan.items() if name != "accumulation"}
    return replace(
        change,
        plan=plan | {"batch_slices": settings},
        micro_batches=None,
        loader=None,
        arguments=tuple(each for each in change.arguments if each not in divided.arguments),
        batch_size=0,
        words=(f"{divided.count} slices of each batch", *change.words[1:]),
        how=(),
        costs="",
    )


def dimension_of_samples(whole: StepInputs | None, parts: StepInputs | None, count: int) -> int | None:
    """Return along which dimension of a model's first input samples lie; None if that cannot be seen.

    Slices find those of the others, such as a recurrent state, themselves.

    >>> one, half = StepInputs(shapes=((35, 20), (20,))), StepInputs(shapes=((35, 10), (10,)))
    >>> dimension_of_samples(one, half, 2)
    1
    """
    if whole is None or parts is None:
        return None
    vectors = False
    for one, part in zip(whole.shapes, parts.shapes, strict=False):
        if len(one) != len(part) or one == part:
            continue
        if len(one) > 1:
            pairs = enumerate(zip(one, part, strict=True))
            dims = [dim for dim, (size, smaller) in pairs if size == count * smaller != smaller]
            return dims[0] if len(dims) == 1 else None
        vectors = True
    return 0 if vectors else None
