"""The search for the fewest changes that are enough, then the cheapest, in few runs: a plan with another aim.

run ──> changes for its peak ──> rerun or replay ──> enough? ──> done
              ^                                        │ none
              └───── on top of what saved most <───────┘

Operations are recorded only for batches that could be divided: whether their samples depend on each other.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from itertools import islice
from operator import or_

from memfit.analysis.needed_memory import ReplayableRun
from memfit.analysis.trial_result import RunTrial
from memfit.planning.batch_size_changes import (
    BatchSizeRun,
    batch_division_changes,
    batch_size_of_setting,
    bytes_independent_of_batch,
    find_batch_size_setting,
    next_batch_size,
    smaller_batch_change_of_division,
    smaller_batch_changes,
)
from memfit.planning.run_changes_on_ghost import PlanRuns
from memfit.planning.sample_independence import compare_steps_of_parts
from memfit.planning.strategy_and_allocator_changes import (
    FUSED_OPTIMIZER,
    OFFLOADED_ACTIVATIONS,
    checkpointing_changes,
    expandable_segments_change,
    low_precision_script_options,
)
from memfit.records import (
    Change,
    DryRun,
    Phase,
    PlanRun,
    ScriptEnd,
    SecondsPerDriverCall,
    StepOperations,
)

MOST_RUNS = 12
"""Reruns of a script at most, besides the one with unlimited memory."""
_MOST = 3
_WORTH = 0.01
"""Share of what a run needs that a change must save."""
_NEARLY = 0.9
"""Share of the largest saving from which a cheaper change is the better base of a combination."""
_MUCH = 0.1
"""Share of activations at the peak from which saving them is worth some time."""
_UNTIMED = float("inf")


class ChangeKind(StrEnum):
    """Of changes of one kind, at most one is made."""

    SETTINGS = "settings"
    OPTIMIZER = "optimizer"
    BATCH = "batch"
    CHECKPOINTING = "checkpointing"
    PRECISION = "precision"
    OFFLOAD = "offload"


Made = Mapping[ChangeKind, Change]


@dataclass(frozen=True, slots=True)
class TriedChanges:
    """Changes made together, and what the script then needs."""

    made: Made
    run: PlanRun
    models: tuple[str, ...]
    """Models that strategies were applied to: the class of each, and the line that creates its optimizer."""
    fits: bool | None
    """Whether it certainly fits the device; None without a device."""

    @property
    def change(self) -> Change:
        """The changes together."""
        return self.run.change

    @property
    def needs(self) -> int:
        """Bytes of the process."""
        return self.run.needs.bytes


class FewestChangesSearch:
    """Looks for the smallest sets of changes that are enough.

    Args:
        first: the unchanged run, with unlimited memory if it does not fit.
        run_trial: runs the script under a change; None to try allocator settings only.
        found: the summary of the unchanged run, as it ran.
    """

    def __init__(self, first: ReplayableRun, run_trial: RunTrial | None, found: DryRun) -> None:
        device, trace = found.device, first.trace
        room = max(device.total.bytes - found.uncertainty, 0)  # a fit that may fail is not enough
        self._has_room, self._can_run, self._gpu = bool(room), run_trial is not None, device.total.bytes
        self._budget = room - device.in_use
        self._runs = PlanRuns(run_trial or _never, self._budget, tune=False)
        self._settings = expandable_segments_change(trace)
        self._setting, self._options = find_batch_size_setting(trace), trace.options
        self._divisions = batch_division_changes(trace, draws=False)
        self._batches = (*self._divisions, *smaller_batch_changes(trace))
        self._known: dict[Change, TriedChanges | None] = {}
        self.undivided: str | None = None
        """Why batches are not divided, as in a plan; empty if they may be, None if that could not be seen."""
        self._judged = False
        self.failed: ScriptEnd | None = None
        """How the first rerun that failed ended."""
        self.refused = False
        """Whether a run was not made because there had been too many."""
        self.unchanged = self._learn({}, first, (), fails=found.ran_out or bool(found.caught))
        """The run without a change."""
        self._fails = self.unchanged.fits is False

    def best(self) -> Iterator[list[TriedChanges]]:
        """Yield the best sets of changes so far, whenever one has been tried.

        Sets that are enough come first, the smallest and then the cheapest first, without the others. If none
        is enough, those that save most come first. If the script fits unchanged, all sets are enough.
        """
        found: list[TriedChanges] = []
        base: TriedChanges | None = self.unchanged
        enough: list[TriedChanges] = []
        while base is not None:
            bases: list[TriedChanges] = []
            for kind, ways in self._ways(base.run):
                if kind in base.made:
                    continue
                found += (helped := self._on_top_of(base, kind, ways))
                if kind is not ChangeKind.BATCH:  # how small depends on what else is changed
                    bases += helped
                enough = sorted(
                    (one for one in found if one.fits is not False), key=lambda one: len(one.made)
                )
                yield (enough or sorted(found, key=lambda one: one.needs))[:_MOST]
                if len(enough) == _MOST:
                    return
            base = self._next_base(bases) if self._fails and not enough else None

    def smaller_batches(self) -> dict[int, PlanRun]:
        """Return the runs with smaller batches and no other change, by the size of these."""
        tried = [one for one in self._known.values() if one is not None and [*one.made] == [ChangeKind.BATCH]]
        return {one.made[ChangeKind.BATCH].batch_size: one.run for one in tried}

    def _ways(self, run: PlanRun) -> Iterator[tuple[ChangeKind, Sequence[Change]]]:
        """Yield the ways to lower the peak of a run, the cheapest kind first."""
        if self._settings is not None:
            yield ChangeKind.SETTINGS, (self._settings,)
        if not self._can_run:
            return
        if run.place.phase is Phase.OPTIMIZER:
            yield ChangeKind.OPTIMIZER, (FUSED_OPTIMIZER,)
        if self._fails:
            yield ChangeKind.BATCH, self._batches
        at_peak = {term.name: term.figure.bytes for term in run.terms}
        if at_peak["activations"] > _MUCH * at_peak["allocated"]:
            yield ChangeKind.CHECKPOINTING, checkpointing_changes(self._options)
            yield ChangeKind.PRECISION, low_precision_script_options(self._options)
            yield ChangeKind.OFFLOAD, (OFFLOADED_ACTIVATIONS,)

    def _next_base(self, bases: list[TriedChanges]) -> TriedChanges | None:
        """Return the cheapest of the attempts that save about as much as the best; None without any."""
        saved = [self.unchanged.needs - one.needs for one in bases]
        return next(
            (one for one, much in zip(bases, saved, strict=True) if much >= _NEARLY * max(saved)), None
        )

    def _on_top_of(self, base: TriedChanges, kind: ChangeKind, ways: Sequence[Change]) -> list[TriedChanges]:
        """Return the first of the ways that helps, if one does; of batches, the largest that fit."""
        helping = (then for then in self._tries(base, kind, ways) if self._helps(then, base))
        return [self._without_idle(then) for then in islice(helping, 1)]

    def _tries(self, base: TriedChanges, kind: ChangeKind, ways: Sequence[Change]) -> Iterator[TriedChanges]:
        tries: Iterable[TriedChanges | None] = (self._attempt({**base.made, kind: way}) for way in ways)
        if kind is ChangeKind.BATCH:  # fewer samples make another update: only where none can be divided
            parts = self._largest_that_fits(base, [way for way in ways if way.micro_batches is not None])
            if parts is not None and self._must_stay_whole():
                parts = None
            smaller = [way for way in ways if way.micro_batches is None]
            tries = [parts or self._largest_that_fits(base, smaller)]
        yield from (then for then in tries if then is not None)

    def _largest_that_fits(self, base: TriedChanges, ways: Sequence[Change]) -> TriedChanges | None:
        """Return the run with the largest batch that fits; if none fits, the smallest; None if none ran."""
        if self._setting is None:
            return None
        by_size = {way.batch_size: way for way in ways}
        runs = [BatchSizeRun(batch_size_of_setting(self._setting), base.needs, fits=False)]
        tried: dict[int, TriedChanges] = {}
        fixed = bytes_independent_of_batch(base.run.terms) + base.needs - base.run.reserved.bytes
        while size := next_batch_size(runs, sorted(by_size), self._budget, fixed=fixed, proven=False):
            then = self._attempt({**base.made, ChangeKind.BATCH: by_size[size]})
            if then is None:
                break
            tried[size] = then
            runs.append(BatchSizeRun(size, then.needs, fits=bool(then.fits)))
        fitting = [size for size, then in tried.items() if then.fits]
        return tried[max(fitting) if fitting else min(tried)] if tried else None

    def _must_stay_whole(self) -> bool:
        """Return whether two recorded steps show that batches must not be divided, as for a plan."""
        if not self._judged:
            self._judged = True
            whole = self._recorded(Change(), "whole batches")
            half = None if whole is None else self._recorded(self._divisions[0], "smaller batches")
            if whole is not None and half is not None:
                samples = compare_steps_of_parts(whole, half, self._divisions[0].parts)
                self.undivided = None if samples.assumed and not samples.why else samples.why
        return bool(self.undivided)

    def _recorded(self, plan: Change, what: str) -> StepOperations | None:
        """Return the operations of a step, without ``torch.compile``; None if they could not be recorded."""
        if self._runs.count == MOST_RUNS:
            self.refused = True
            return None
        words = (f"{what}, operation by operation",)
        change = replace(smaller_batch_change_of_division(plan), eager=True, words=words)
        ran = self._runs.run(change, operations=True)
        return None if isinstance(ran, ScriptEnd) else ran[0].operations

    def _helps(self, then: TriedChanges, base: TriedChanges) -> bool:
        worth = base.needs - then.needs >= _WORTH * self.unchanged.needs
        return worth or bool(then.fits and not base.fits)

    def _without_idle(self, then: TriedChanges) -> TriedChanges:
        """Return a set that is enough without the changes that it does not need."""
        for kind in list(then.made)[:-1] if then.fits else ():  # without the last, it is not enough
            fewer = self._attempt(_without(then.made, kind))
            if fewer is not None and fewer.fits:
                return self._without_idle(fewer)
        return then

    def _attempt(self, made: Made) -> TriedChanges | None:
        """Make changes together: settings by a replay, anything else by a rerun. None if that failed."""
        without = _without(made, ChangeKind.SETTINGS)
        if (change := _together(without)) not in self._known:
            self._known[change] = None
            self._run(without)
        known = self._known.get(_together(made))
        return known and replace(known, made={kind: known.made[kind] for kind in made})

    def _run(self, made: Made) -> None:
        if self._runs.count == MOST_RUNS:
            self.refused = True
            return
        ran = self._runs.run(_together(made))
        if isinstance(ran, ScriptEnd):
            self.failed = self.failed or ran
        else:
            self._learn(made, ran[1], ran[0].models)

    def _learn(
        self, made: Made, run: ReplayableRun, models: tuple[str, ...], *, fails: bool = False
    ) -> TriedChanges:
        """Remember what a run needs, also under the allocator setting; its trace is not kept."""
        sets = [made]
        proves = not (fails and run.on(self._gpu).fits)  # the replay is like the run
        if self._settings is not None and proves:
            tuned = replace(run, conf=self._settings.allocator)
            setting = replace(self._settings, costs=_driver_calls(run, tuned))
            sets.append({**made, ChangeKind.SETTINGS: setting})
        attempts = []
        for one in sets:
            plan = _together(one)
            done = self._runs.needs([run], plan, _UNTIMED, fails_at=self._gpu if fails and one is made else 0)
            attempts.append(
                TriedChanges(one, done, models, self._runs.fits(done) if self._has_room else None)
            )
            self._known[plan] = attempts[-1]
        return attempts[0]


def _never(_change: Change, _what: str) -> ScriptEnd:
    raise AssertionError  # without a script, nothing is run


def _together(made: Made) -> Change:
    return reduce(or_, made.values(), Change())


def _without(made: Made, kind: ChangeKind) -> Made:
    return {other: change for other, change in made.items() if other is not kind}


def _driver_calls(before: ReplayableRun, after: ReplayableRun) -> str:
    """Return the cost of allocator settings as text."""
    calls = before.unlimited.calls_per_step, after.unlimited.calls_per_step
    if calls[0] is None or calls[1] is None:
        return "an unknown amount of time: fewer than two steps completed"
    more = SecondsPerDriverCall().seconds(calls[1]) - SecondsPerDriverCall().seconds(calls[0])
    return (
        f"{1000 * more:.1f} ms per step (assumed) in driver calls" if more > 0 else "no time in a steady step"
    )
