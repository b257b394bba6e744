"""What the searches for a plan have in common: how they begin, what they report, and their answer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from memfit.analysis.needed_memory import memory_needed_without_convolution_workspaces
from memfit.analysis.trial_result import TrialResult
from memfit.errors import TargetError
from memfit.planning.memory_floor import MemoryFloor
from memfit.planning.module_checkpoint_options import bytes_of_storages
from memfit.planning.run_changes_on_ghost import PlannedScript, PlanRuns, replayable_runs_of_ranks
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import (
    Change,
    Figure,
    HostUnits,
    PlanRun,
    ScriptPlan,
    StepOperations,
    Term,
    traits_of_strategy,
)
from memfit.timing.step_time import step_time_of_trace
from memfit.units import format_gib

_NOT_YET = "The time for the search was over before a plan fitted. Those that memfit has not run yet may fit."
TOO_LATE = "The time for the search was over before the script had run once, as written. Allow more time."
OnFound = Callable[[ScriptPlan], None]
_TOTALS = ("allocated", "cached, not allocated", "reserved", "process")
_MUCH = 0.02
"""Share of a peak from which what holds it is named."""


class OutOfTimeError(Exception):
    """The time for a search is over: raised where a run reports its progress."""


@dataclass(eq=False)
class PlanSearch(ABC):
    """What searches for a plan have in common: the script as written, their runs, and the answer so far."""

    _script: PlannedScript
    _plain: TrialResult
    """Its run as written, with what a step of it runs."""
    _budget: int
    """Bytes of the process."""
    _allowed: AllowedChanges
    _on_found: OnFound
    """Called with the answer so far whenever there is a plan that fits, and a better one."""

    _least_time = 0.0
    """What no plan takes less time than, relative to the script as written; 0 if that is not known."""
    _compiled = False
    """Whether ``torch.compile`` compiles the script's code."""

    def __post_init__(self) -> None:
        self._written = replayable_runs_of_ranks(self._plain)
        self._target = self._budget - self._written[0].found.uncertainty
        """Bytes within which a plan is not tight."""
        self._runs = PlanRuns(
            self._script.run,
            self._target,
            tune=self._allowed.allocator,
            compiled=self._compiled,
            written=self._written[0].found.step_time,
        )
        if (host := self._limiting_host()) is not None and host.checkpointed_regions:
            alone = self._script.run(Change(), "as written")
            if isinstance(alone, TrialResult):
                self._runs.written = step_time_of_trace(alone.trace) or self._runs.written
        self._optimizer = None if self._plain.operations is None else self._plain.operations.optimizer
        self._as_written: PlanRun | None = None
        self._best_so_far: PlanRun | None = None
        self._undivided = ""
        """As in ``ScriptPlan``."""

    def _limiting_host(self) -> HostUnits | None:
        """Return what the host does in a step as written, if that limits it."""
        step, time = self._plain.trace.step, self._runs.written
        return None if step is None or time is None or not time.is_bound_by_host else step.host

    def plan(self) -> ScriptPlan:
        """Return the fastest plan found, or why there is none."""
        self._as_written = as_written = self._runs.needs(self._written, Change(), 1.0, tune=False)
        if self._runs.fits(as_written):
            return self._answer(chosen=as_written)
        tuned = self._runs.needs(self._written, Change(), 1.0)
        if tuned.change.allocator:
            self._runs.tried.append(tuned)
        return self._search_from(tuned)

    @abstractmethod
    def _search_from(self, tuned: PlanRun) -> ScriptPlan:
        """Go on from the script with the best settings of the allocator, which may fit."""

    @abstractmethod
    def policies(self) -> tuple[PlanRun, ...]:
        """Run the policies that people use; those that the script or its model refuses are left out."""

    @property
    def _ran(self) -> list[PlanRun]:
        """The script as written, and every plan that ran."""
        return [run for run in (self._as_written, *self._runs.tried) if run is not None]

    def _offer(self) -> None:
        """Report the fastest plan that fits and is fast enough, if it is a better one than before."""
        slowdown = self._allowed.slowdown
        fitting = [run for run in self._ran if run.needs.bytes <= self._budget and run.time <= slowdown]
        best = min(fitting, key=lambda run: (run.needs.bytes > self._target, run.time), default=None)
        if best is not None and best is not self._best_so_far:
            self._best_so_far = best
            self._on_found(self._answer(chosen=best, bound=0.0))

    def so_far(self) -> ScriptPlan:
        """Return the answer of a search whose time is over."""
        self._offer()
        smallest = min(self._runs.tried, key=lambda run: run.needs.bytes, default=None)
        chosen = self._best_so_far
        found = self._answer(chosen=chosen, smallest=smallest if chosen is None else None, bound=0.0)
        return replace(found, reason="" if found.chosen is not None else _NOT_YET, out_of_time=True)

    def _answer(
        self,
        *,
        chosen: PlanRun | None = None,
        smallest: PlanRun | None = None,
        bound: float | None = None,
        reason: str = "",
    ) -> ScriptPlan:
        """Return what the search has found.

        Args:
            chosen: the fastest plan that fits.
            smallest: as in ``ScriptPlan``, like what follows.
            bound: by default the least time.
            reason: why there is no plan.
        """
        as_written = self._as_written
        if as_written is None:
            raise TargetError(TOO_LATE)
        trace, operations, found = self._plain.trace, self._plain.operations, self._written[0].found
        chosen = None if chosen is None else self._runs.made_by_loop(chosen)
        needs, bare, slowdown = as_written.needs, None, self._allowed.slowdown
        bound, rule = self._least_time if bound is None else bound, self._script.rule
        if needs.bytes > self._budget:
            bare = memory_needed_without_convolution_workspaces(trace, found, trace.device, needs)
        too_slow = chosen if chosen is not None and chosen.time > slowdown else None
        chosen = None if too_slow is not None else chosen
        in_model = chosen is None or any(traits_of_strategy(name).is_in_model for name in chosen.change.plan)
        answer = ScriptPlan(
            device=trace.device,
            budget=self._budget,
            as_written=as_written,
            chosen=chosen,
            smallest=smallest,
            bound=bound if chosen is None else min(bound, chosen.time),
            rule=f"a recorded step of each run, with {rule}" if self._runs.written else rule,
            tried=tuple(self._runs.tried),
            models=self._runs.models if in_model else (),
            optimizer=self._optimizer,
            command=trace.command,
            versions=trace.versions,
            reason=reason,
            uncertainty=found.uncertainty,
            without_workspaces=0 if bare is None else bare.bytes,
            undivided=self._undivided,
            log_probabilities=0 if operations is None else log_softmax_bytes(operations),
            max_slowdown=slowdown if isfinite(slowdown) else None,
            too_slow=too_slow,
            dropped=tuple(self._runs.dropped),
            step_time=self._runs.written,
            sharding_calls=self._plain.sharding_calls,
        )
        return self._completed(answer)

    def _completed(self, answer: ScriptPlan) -> ScriptPlan:
        """Return an answer with what only this kind of search knows."""
        return answer

    def _answer_below(self, floor: MemoryFloor, smallest: PlanRun) -> ScriptPlan:
        """Return that no plan can fit, because the floor of all plans exceeds the budget."""
        needs = floor.needs
        reason = (
            f"Whatever a plan changes, there exist at one time: {_much_of(floor.terms, needs)}. That is "
            f"{format_gib(needs.bytes)} ({needs.provenance}), more than the budget, so no plan can fit."
        )
        return replace(self._answer(smallest=smallest, reason=reason), floor=needs)


def _much_of(terms: Sequence[Term], needs: Figure) -> str:
    """Return the terms that matter beside what is needed, totals apart, for the user."""
    return ", ".join(
        f"{term.name} {format_gib(term.figure.bytes)}"
        for term in terms
        if term.name not in _TOTALS and term.figure.bytes >= _MUCH * needs.bytes
    )


def ways_tried(smallest: PlanRun, tried: Sequence[PlanRun]) -> str:
    """Return how memfit lowered the peak, as a clause.

    Args:
        smallest: the plan that needs least.
        tried: all that ran.
    """
    ways = ["shards the model"] * ("sharding" in smallest.change.plan)
    ways += ["divides batches"] * (smallest.change.micro_batches is not None)
    ways += ["recomputes activations", "offloads the inputs of what it recomputes"]
    if any("optimizer_state" in run.change.plan for run in tried):
        ways.append("updates parameters in the backward or offloads the optimizer's state")
    return f"{', '.join(ways[:-1])}, and {ways[-1]}"


def why_smallest_exceeds_budget(smallest: PlanRun, ways: str) -> str:
    """Return why no plan fits: what holds the memory at the smallest peak.

    Args:
        smallest: the plan that needs least.
        ways: what memfit does to lower the peak, as a clause.
    """
    place = smallest.place
    where = " of ".join(filter(None, (f"the {place.phase}", place.module)))
    held = _much_of(sorted(smallest.terms, key=lambda term: -term.figure.bytes), smallest.needs)
    return f"memfit {ways}. None of these plans fits. At the smallest peak, in {where}, there are: {held}."


_LOG_SOFTMAX = "aten._log_softmax.default"


def log_softmax_bytes(step: StepOperations) -> int:
    """Return the bytes of the largest log-softmax of a step, the cross-entropy's; 0 if it has none.

    The logits before it and the gradient after it have as many elements.
    """
    return max(
        (bytes_of_storages(step, each.creates) for each in step.forward if each.name == _LOG_SOFTMAX),
        default=0,
    )
