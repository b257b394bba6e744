"""Batch slices in place of the micro-batches that a script's loop would have to make.

A search divides batches by the script's own batch size. Where no option of the script sums the gradients of
the parts, ``BatchSlices`` divide the same batches inside the model's call, and the loop stays as it is. They
also hold the outputs of the whole batch and what the loss makes of them: they have run on the ghost before a
plan has them.
"""

from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

from memfit.planning.run_changes_on_ghost import PlanRuns
from memfit.records import Change, PlanRun, ScriptEnd


def fastest_in_slices(
    found: PlanRun, ran: Iterable[PlanRun], runs: PlanRuns, budget: int, again: float
) -> tuple[PlanRun, PlanRun | None]:
    """Return the fastest plan that fits and leaves the loop as it is, and the plan that it stands for.

    Args:
        found: the fastest plan that fits.
        ran: all plans that ran.
        runs: of the search.
        budget: bytes of the process.
        again: the time of running the model's forward on a batch again, relative to a step of the script as
            written; 0 if the model returns its loss, so that nothing runs again.

    Returns:
        The plan; ``found`` if no slices fit. With slices, ``found`` as the loop would make it, too.
    """
    more: dict[int, int] = {}  # by parts: bytes that slices needed more than micro-batches
    tight: list[PlanRun] = []
    fitting = [run for run in ran if run.needs.bytes <= budget and run.time >= found.time]
    for plan in sorted({id(each): each for each in (found, *fitting)}.values(), key=attrgetter("time")):
        divided = plan.change.micro_batches
        if divided is None or not divided.by_hand:
            return plan, None
        if divided.dim is None or plan.needs.bytes + more.get(divided.count, 0) > budget:
            continue
        sliced = _run_in_slices(plan, runs, again)
        if sliced is None:  # refused
            break
        if runs.fits(sliced):
            return _with_more_kept(sliced, plan, runs, again), without_running_again(found, again)
        more[divided.count] = sliced.needs.bytes - plan.needs.bytes
        tight += [sliced] * (sliced.needs.bytes <= budget)
    return (tight[0], without_running_again(found, again)) if tight else (found, None)


def _run_in_slices(plan: PlanRun, runs: PlanRuns, again: float, kept: int = 1) -> PlanRun | None:
    count = plan.change.parts
    time = without_running_again(plan, again).time + again * (count - kept) / count
    made = runs.make(change_to_slices(plan.change, kept), time)
    return None if isinstance(made, ScriptEnd) else made[1]


def _with_more_kept(sliced: PlanRun, plan: PlanRun, runs: PlanRuns, again: float) -> PlanRun:
    """Return a plan with slices in which as many are kept as the room has, if each saves as much."""
    saved = sum(term.figure.bytes for term in sliced.terms if "activations" in term.name)
    room = runs.budget - sliced.needs.bytes
    kept = min(plan.change.parts - 1, 1 + room // saved) if saved and again else 1
    more = _run_in_slices(plan, runs, again, kept) if kept > 1 else None
    return more if more is not None and runs.fits(more) else sliced


def without_running_again(found: PlanRun, again: float) -> PlanRun:
    """Return a plan with the time that it takes if the loop divides batches, as in ``run_in_slices``."""
    divided = found.change.micro_batches
    if divided is None or not divided.by_hand:
        return found
    return replace(found, time=found.time - again * (divided.count - 1) / divided.count)


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
