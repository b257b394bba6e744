"""Find a plan for a script whose model ``torch.compile`` compiles: every candidate is compiled, and runs.

    batches in 2, 4, ... parts    if samples are independent: until one fits, or smaller parts take too long
    activation_memory_budget      of the last of these, and back to whole batches: while a faster plan may fit
    every block checkpointed      if nothing else fits

What a graph keeps is PyTorch's choice, under a share of its activations. The peak does not follow from the
share: less is kept, but more is recomputed at once. So shares are sampled: between those that fit and those
that do not, and around the one that needs least if none fits.

Whether samples are independent is read from eager runs: graphs do not show it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from memfit.analysis.trial_result import TrialResult, why_run_failed
from memfit.planning.batch_size_changes import (
    batch_division_changes,
    smaller_batch_change_of_division,
    why_batches_are_indivisible,
    with_facts_on_samples,
)
from memfit.planning.memory_floor import MemoryFloor, MemoryFloors, memory_floor_of_updates
from memfit.planning.plan_search_base import (
    PlanSearch,
    why_smallest_exceeds_budget,
)
from memfit.planning.run_changes_on_ghost import PlanRuns, forward_and_backward_seconds
from memfit.planning.sample_independence import (
    SampleComparison,
    compare_steps_of_parts,
)
from memfit.planning.strategy_and_allocator_changes import (
    activation_memory_budget_change,
    block_checkpointing_policies,
)
from memfit.records import Change, PlanRun, ScriptEnd, ScriptPlan, StepOperations

_MOST_RUNS = 6
"""Plans that run on the ghost at most: each is compiled, which takes most of its time."""
_WORTH = 0.01
"""Share of a step's time that another plan must be able to save to be compiled."""
_RECOMPUTED = 0.25
"""Share of a step's time that smaller parts may add before shares of the last are tried: about what it takes
to recompute most of the forward."""
_ALL, _STEP = 100, 10
"""All activations that PyTorch keeps by itself, in hundredths; how finely shares are sampled."""
_BITWISE = (
    "torch.compile compiles the script's code. What lowers its memory changes the kernels, which then round "
    "at other places; --bitwise permits only settings of the allocator."
)
_NO_PRECISIONS = "memfit changes neither precision nor optimizer of compiled scripts (--allow)."
_NOT_EAGER = "memfit reads that from a run without torch.compile, and "
_UNSEEN = "memfit saw no two updates by one optimizer (the script ends before), or nothing was compiled"
_WAYS = (
    "divides batches where samples are independent, lowers the share of the activations that compiled graphs "
    "keep, and checkpoints every block"
)


@dataclass(frozen=True, slots=True)
class _Family:
    """The script with batches of one size."""

    change: Change
    run: PlanRun
    """With all activations kept that PyTorch keeps by itself."""
    shares: dict[int, PlanRun] = field(default_factory=dict)
    """What ran, by hundredths of these activations."""


class CompiledPlanSearch(PlanSearch):
    """A search for a plan of compiled code."""

    _compiled = True
    _samples = SampleComparison()
    """Of whole batches and their parts, once these have run."""

    def _search_from(self, tuned: PlanRun) -> ScriptPlan:
        self._offer()
        if (floor := self._floor()).needs.bytes > self._budget:
            return self._answer_below(floor, tuned)
        if floor.needs.bytes > self._runs.budget:
            self._runs.budget = self._budget  # every plan is tight
        if self._allowed.precisions or self._allowed.low_bit_state:
            self._runs.dropped.append(_NO_PRECISIONS)
        families: list[_Family] = []
        if self._allowed.rounding and not self._runs.fits(tuned):
            families = self._divided(_Family(Change(), tuned))
            self._sample_families(families)
            if self._best() is None:
                self._try(families[-1].change | block_checkpointing_policies(self._optimizer)[0])
        best = self._best()
        if self._runs.budget < self._budget and (best is None or best.time > self._allowed.slowdown):
            self._runs.budget = self._budget  # what fits only now is tight
            self._sample_families(families)
            best = self._best()
        if best is not None:
            return self._answer(chosen=best)
        smallest = min([*self._runs.tried, tuned], key=lambda run: run.needs.bytes)
        reason = why_smallest_exceeds_budget(smallest, _WAYS) if self._allowed.rounding else _BITWISE
        return self._answer(smallest=smallest, reason=reason)

    def _floor(self) -> MemoryFloor:
        """Return the floor of all plans: none changes the optimizer."""
        ways = (MemoryFloors(self._plain, 1).under(Change()), memory_floor_of_updates(self._plain))
        return max(ways, key=lambda floor: floor.needs.bytes)

    def policies(self) -> tuple[PlanRun, ...]:
        """Run the policies that people use; those that the script or its model refuses are left out."""
        tune, written = self._allowed.allocator, self._runs.written
        runs = PlanRuns(self._script.run, self._budget, tune=tune, compiled=True, written=written)
        policies = block_checkpointing_policies(self._optimizer)
        self._script.run_ahead(_next(runs, policies))
        made = [self._run(policy, runs) for policy in policies]
        return tuple(each[1] for each in made if not isinstance(each, str))

    # ---- candidates ---------------------------------------------------------------------------------------

    def _divided(self, whole: _Family) -> list[_Family]:
        """Run the script with smaller and smaller batches, until it fits; return it with each of them."""
        families = [whole]
        ways = self._divisions()
        for division in ways:
            last = families[-1]
            if self._runs.fits(last.run) or len(self._runs.tried) >= _MOST_RUNS:
                break
            if len(families) > 1:
                needs, time = _extrapolated(families[-2], last, division.parts)
                least = None
                if time > last.run.time + _RECOMPUTED:
                    self._run_ahead(last, _STEP, _ALL - _STEP)
                    least = self._sample(last, _STEP)
                if self._fits(least):
                    break
                saved = last.run.needs.bytes - least.needs.bytes if least is not None else 0
                needs -= saved * last.change.parts / division.parts
                if needs > self._budget and division is not ways[-1]:
                    continue
            made = self._try(division)
            if made is None:
                break
            families.append(_Family(division, made))
        return families

    def _divisions(self) -> list[Change]:
        """Return the ways to divide batches, if they may be."""
        trace = self._plain.trace
        ways = batch_division_changes(trace, draws=False)
        if not ways:
            self._undivided = why_batches_are_indivisible(trace)
            return []
        draws = self._judge(ways[0])
        found = [] if self._undivided else batch_division_changes(trace, draws=draws)
        return [with_facts_on_samples(each, self._samples.assumed, None) for each in found]

    def _judge(self, division: Change) -> bool:
        """Find out whether batches must not be divided; return whether a step draws random numbers."""
        steps: list[StepOperations] = []
        wanted = [
            (
                replace(smaller_batch_change_of_division(change), operations=True, eager=True),
                f"{what}, without torch.compile",
            )
            for what, change in (("whole batches", Change()), (division.words[0], division))
        ]
        self._script.run_ahead([*_next(self._runs, [division]), *wanted])
        for eager, what in wanted:
            run = self._script.run(eager, what)
            if isinstance(run, ScriptEnd) or run.operations is None:
                why = why_run_failed(run) if isinstance(run, ScriptEnd) else _UNSEEN
                self._undivided = f"{_NOT_EAGER}{why}"
                return False
            steps.append(run.operations)
        whole, half = steps
        self._samples = compare_steps_of_parts(whole, half, division.parts)
        self._undivided = self._samples.why
        return any(each.random for each in whole.forward)

    def _sample_families(self, families: Sequence[_Family]) -> None:
        for family in reversed(families):
            self._sample_shares(family)

    def _sample_shares(self, family: _Family) -> None:
        """Sample the shares between those that fit and those that do not, while a faster plan may fit."""
        if self._runs.fits(family.run):
            return
        low = max((share for share, run in family.shares.items() if self._runs.fits(run)), default=0)
        high = _ALL
        while self._may_pay(family.run):
            share = _next_share(low, high, fits=self._best() is not None)
            if share == 0:
                break
            self._run_ahead(family, share, self._guess_next(family, low, share, high))
            made = self._sample(family, share)
            too_much = made is None or (not self._fits(made) and self._may_pay(made))
            low, high = (low, share) if too_much else (share, high)
        if self._best() is None:
            for share in _beside_smallest(family):
                self._sample(family, share)

    def _guess_next(self, family: _Family, low: int, share: int, high: int) -> int:
        """Return the share that will probably be next, should needs between two shares lie on a line."""
        if low == 0:
            return _next_share(share, high, fits=True)
        below, above = family.shares[low], family.shares.get(high, family.run)
        between = (share - low) / (high - low)
        needs = below.needs.bytes + between * (above.needs.bytes - below.needs.bytes)
        if needs > self._budget:
            return _next_share(low, share, fits=True)
        return _next_share(share, high, fits=True)

    def _run_ahead(self, family: _Family, *shares: int) -> None:
        """Run shares side by side: the search samples the first next, and probably the others after it."""
        left = _MOST_RUNS - len(self._runs.tried)
        new = [share for share in shares if share and share not in family.shares][:left]
        if new and new[0] == shares[0]:
            self._script.run_ahead(_next(self._runs, [self._share_of(family, share) for share in new]))

    def _share_of(self, family: _Family, share: int) -> Change:
        return family.change | activation_memory_budget_change(share / _ALL, self._optimizer)

    def _sample(self, family: _Family, share: int) -> PlanRun | None:
        if share not in family.shares and len(self._runs.tried) < _MOST_RUNS:
            made = self._try(self._share_of(family, share))
            if made is not None:
                family.shares[share] = made
        return family.shares.get(share)

    def _fits(self, run: PlanRun | None) -> bool:
        return run is not None and self._runs.fits(run)

    def _may_pay(self, run: PlanRun) -> bool:
        """Return whether plans that take no less time than a run may be taken instead of the best."""
        best = self._best()
        return best is None or run.time < min(best.time - _WORTH, self._allowed.slowdown)

    def _best(self) -> PlanRun | None:
        """Return the fastest plan that fits."""
        return min(filter(self._runs.fits, self._ran), key=lambda run: run.time, default=None)

    def _try(self, plan: Change) -> PlanRun | None:
        """Run a plan; return None if it cannot be."""
        made = self._run(plan, self._runs)
        if isinstance(made, str):
            self._runs.drop(plan, made)
            return None
        self._runs.models = made[0].models or self._runs.models
        self._offer()
        return made[1]

    def _run(self, plan: Change, runs: PlanRuns) -> tuple[TrialResult, PlanRun] | str:
        """Run a plan; if it cannot run, return the reason as a clause."""
        made = runs.make(plan, self._time, operations=True)
        if isinstance(made, ScriptEnd):
            return why_run_failed(made)
        if made[0].operations is None:
            runs.tried.pop()
            return _UNSEEN
        return made

    def _time(self, result: TrialResult) -> float:
        """Return the time from one update to the next, relative to the script as written."""
        if result.operations is None or self._plain.operations is None:
            return float("inf")
        seconds = self._script.seconds
        return forward_and_backward_seconds(result.operations, seconds) / forward_and_backward_seconds(
            self._plain.operations, seconds
        )


def _extrapolated(first: _Family, second: _Family, parts: int) -> tuple[float, float]:
    """Return what a script with smaller batches needs and takes, if both are linear in sizes and numbers."""
    one, other = first.change.parts, second.change.parts
    sample = (first.run.needs.bytes - second.run.needs.bytes) / (1 / one - 1 / other)
    time = (second.run.time - first.run.time) / (other - one)
    needs = second.run.needs.bytes + sample * (1 / parts - 1 / other)
    return needs, second.run.time + time * (parts - other)


def _next(runs: PlanRuns, plans: Sequence[Change]) -> list[tuple[Change, str]]:
    """Return what plans will be run with if they run next, in their order."""
    return [runs.next_run(plan, after, operations=True) for after, plan in enumerate(plans)]


def _next_share(low: int, high: int, *, fits: bool) -> int:
    """Return the share to be sampled next between two others; 0 if there is none.

    Once something fits, that is the highest: if it fits, or is too slow, the others need not be compiled.

    >>> _next_share(0, 100, fits=False), _next_share(0, 100, fits=True), _next_share(90, 100, fits=True)
    (50, 90, 0)
    """
    share = _ALL - _STEP if high == _ALL and fits else _between(low, high)
    return 0 if share == low else share


def _between(low: int, high: int) -> int:
    """Return the share halfway between two others; 0 if there is none.

    >>> _between(0, 100), _between(20, 50), _between(50, 60)
    (50, 30, 0)
    """
    middle = (low + high) // 2 // _STEP * _STEP
    return middle if low < middle < high else 0


def _beside_smallest(family: _Family) -> list[int]:
    """Return the shares halfway between the one that needs least and those that ran beside it."""
    if not family.shares:
        return []
    smallest = min(family.shares, key=lambda share: family.shares[share].needs.bytes)
    above = min((share for share in family.shares if share > smallest), default=_ALL)
    below = max((share for share in family.shares if share < smallest), default=0)
    return [share for share in (_between(smallest, above), _between(below, smallest)) if share]
