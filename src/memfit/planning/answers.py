"""What the searches for a plan answer."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import isfinite

from memfit.analysis.summary import summarize
from memfit.analysis.trial_result import TrialResult
from memfit.analysis.workspace_range import needed_without_workspaces
from memfit.planning.floor import Floor
from memfit.planning.logits import log_probabilities
from memfit.planning.plan_runs import PlannedScript
from memfit.records import PlanRun, ScriptPlan
from memfit.units import format_gib

_IN_MODEL = {"precision", "checkpointing", "compilation", "optimizer_state", "sharding"}
"""Settings that ``memfit.apply`` carries out."""
_NOT_YET = "The time for the search was over before a plan fitted. Those that memfit has not run yet may fit."
OnFound = Callable[[ScriptPlan], None]
_TOTALS = ("allocated", "cached, not allocated", "reserved", "process")
_MUCH = 0.02
"""Share of a peak from which what holds it is named."""


class OutOfTimeError(Exception):
    """The time for a search is over: raised where a run reports its progress."""


class BestSoFar:
    """The plan that a search would answer with so far: the fastest that is not tight, if it has any.

    Args:
        budget: bytes of the process.
        target: within which a plan is not tight.
        slowdown: of ``Allowed``.
        on_found: called with the answer whenever there is a better one.
    """

    def __init__(self, budget: int, target: int, slowdown: float, on_found: OnFound) -> None:
        self.run: PlanRun | None = None
        self._budget, self._target, self._slowdown, self._on_found = budget, target, slowdown, on_found

    def offer(self, runs: Iterable[PlanRun], answer: Callable[[PlanRun], ScriptPlan]) -> None:
        """Take the best of some plans, if it fits, is fast enough, and is better than those before.

        Args:
            runs: the plans, those before included.
            answer: returns the search's answer with a plan chosen.
        """
        fitting = [run for run in runs if run.needs.bytes <= self._budget and run.time <= self._slowdown]
        best = min(fitting, key=lambda run: (run.needs.bytes > self._target, run.time), default=None)
        if best is not None and best is not self.run:
            self.run = best
            self._on_found(answer(best))


def out_of_time(found: ScriptPlan) -> ScriptPlan:
    """Return the answer of a search that has run out of time."""
    reason = "" if found.chosen is not None else _NOT_YET
    return replace(found, bound=0.0, reason=reason, out_of_time=True)


def answer(  # noqa: PLR0913 - what a search has found
    script: PlannedScript,
    plain: TrialResult,
    budget: int,
    as_written: PlanRun,
    tried: Sequence[PlanRun],
    models: tuple[str, ...],
    *,
    chosen: PlanRun | None,
    smallest: PlanRun | None,
    reason: str,
    undivided: str,
    slowdown: float,
) -> ScriptPlan:
    """Return what a search has found, without a bound on the time of other plans.

    Args:
        script: the script.
        plain: its run as written.
        budget: bytes of the process.
        as_written: what that run needs.
        tried: every plan that ran.
        models: those that got the last one.
        chosen: the fastest plan that fits.
        smallest: as in ``ScriptPlan``, like what follows.
        reason: the same.
        undivided: the same.
        slowdown: of ``Allowed``.
    """
    trace, operations, found = plain.trace, plain.operations, summarize(plain.trace)
    needs, bare = as_written.needs, None
    if needs.bytes > budget:
        bare = needed_without_workspaces(trace, found, trace.device, needs)
    too_slow = chosen if chosen is not None and chosen.time > slowdown else None
    chosen = None if too_slow is not None else chosen
    return ScriptPlan(
        device=trace.device,
        budget=budget,
        as_written=as_written,
        chosen=chosen,
        smallest=smallest,
        bound=0.0,
        rule=script.rule,
        tried=tuple(tried),
        models=models if chosen is None or _IN_MODEL & chosen.change.plan.keys() else (),
        optimizer=None if operations is None else operations.optimizer,
        command=trace.command,
        versions=trace.versions,
        reason=reason,
        uncertainty=found.uncertainty,
        without_workspaces=0 if bare is None else bare.bytes,
        undivided=undivided,
        log_probabilities=0 if operations is None else log_probabilities(operations),
        max_slowdown=slowdown if isfinite(slowdown) else None,
        too_slow=too_slow,
    )


def too_high(floor: Floor) -> str:
    """Return why no plan can fit, given the floor of all plans."""
    held = ", ".join(
        f"{term.name} {format_gib(term.figure.bytes)}"
        for term in floor.terms
        if term.figure.bytes >= _MUCH * floor.needs.bytes
    )
    return (
        f"Whatever a plan changes, there exist at one time: {held}. That is {format_gib(floor.needs.bytes)} "
        f"({floor.needs.provenance}), more than the budget, so no plan can fit."
    )


def too_small(smallest: PlanRun, ways: str) -> str:
    """Return why no plan fits: what holds the memory at the smallest peak.

    Args:
        smallest: the plan that needs least.
        ways: what memfit does to lower the peak, as a clause.
    """
    place = smallest.place
    where = " of ".join(filter(None, (f"the {place.phase}", place.module)))
    held = sorted(smallest.terms, key=lambda term: -term.figure.bytes)
    named = [
        f"{term.name} {format_gib(term.figure.bytes)}"
        for term in held
        if term.name not in _TOTALS and term.figure.bytes >= _MUCH * smallest.needs.bytes
    ]
    return (
        f"memfit {ways}. None of these plans fits. At the smallest peak, in {where}, there are: "
        f"{', '.join(named)}."
    )
