"""Runs under changes, each made once: what they need, and whether they fit."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from memfit.allocator.config import AllocatorConfig
from memfit.analysis.advice_candidates import AdviceCandidate, RunFacts
from memfit.analysis.needed_memory import ReplayedRun
from memfit.analysis.script_change import RunScript, ScriptChange, TrialResult
from memfit.analysis.summary import summarize
from memfit.errors import UsageError
from memfit.records import ARENA, CallRates, Figure, ScriptEnd

MOST_RUNS = 12
"""Reruns of a script at most, besides the one with unlimited memory."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a run needs under allocator settings."""

    needs: Figure
    """Bytes that PyTorch reserves at its peak on the device, or on the smallest device on which it fits."""
    reserved: Figure
    """Peak of reserved bytes with unlimited memory."""
    seconds: float | None
    """Seconds of driver calls in a steady step; None if too few steps completed."""
    fits: bool | None
    """Whether it certainly fits the device; None without a device."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A run under a change; its trace is not kept."""

    facts: RunFacts
    models: tuple[str, ...]
    outcomes: Mapping[str, _Outcome]
    """By ``ScriptChange.conf``."""


@dataclass(frozen=True, slots=True)
class AdviceAttempt:
    """Changes made together, and what the script then needs."""

    made: tuple[AdviceCandidate, ...]
    change: ScriptChange
    facts: RunFacts
    models: tuple[str, ...]
    """Models that strategies were applied to: the class of each, and the line that creates its optimizer."""
    needs: Figure
    """Bytes that PyTorch reserves at its peak on the device, or on the smallest device on which it fits."""
    reserved: Figure
    """Peak of reserved bytes with unlimited memory."""
    seconds: float | None
    """Seconds of driver calls in a steady step; None if too few steps completed."""
    fits: bool | None
    """Whether it certainly fits the device; None without a device."""


class Trials:
    """Tries changes, each run once, and remembers what came out.

    Args:
        first: the unchanged run, with unlimited memory if it does not fit.
        run: reruns the script.
        total: bytes of the device; 0 if they are unknown.
        room: bytes of it that the process and others may take.
        fails: whether the unchanged run is known not to fit the device.

    Raises:
        MemfitError: the run used another allocator than PyTorch's own, or its history is incomplete.
    """

    def __init__(self, first: TrialResult, run: RunScript, total: int, room: int, *, fails: bool) -> None:
        self._run_script = run
        self._total = total
        self._room = room
        unchanged = _summarized(first, total, room, fails=fails)
        self._runs: dict[ScriptChange, _Run | None] = {ScriptChange(): unchanged}
        self._runs_left = MOST_RUNS
        self.failed: ScriptEnd | None = None
        """How the first rerun that failed ended."""
        self.reruns = True
        """Whether the caller lets the script run again."""
        self.refused = False
        """Whether a run was not made because there had been too many."""

    def unchanged(self) -> AdviceAttempt:
        """Return the run without a change."""
        unchanged = self.attempt(())
        if unchanged is None:
            raise AssertionError  # it was given
        return unchanged

    def attempt(self, made: tuple[AdviceCandidate, ...]) -> AdviceAttempt | None:
        """Make changes together: settings by a replay, anything else by a rerun. None if that failed."""
        without = replace(_together(made), conf="")
        if without not in self._runs:
            what = " + ".join(one.what for one in made if not one.change.conf)
            self._runs[without] = self._run(without, what)
        return self.known(made)

    def known(self, made: tuple[AdviceCandidate, ...]) -> AdviceAttempt | None:
        """Return what came out of an attempt; None if it was not made, or failed."""
        change = _together(made)
        run = self._runs.get(replace(change, conf=""))
        outcome = run.outcomes.get(change.conf) if run is not None else None
        if run is None or outcome is None:
            return None
        return AdviceAttempt(
            made,
            change,
            run.facts,
            run.models,
            outcome.needs,
            outcome.reserved,
            outcome.seconds,
            outcome.fits,
        )

    def _run(self, change: ScriptChange, what: str) -> _Run | None:
        if not self.reruns or not self._runs_left:
            self.refused |= self.reruns
            return None
        self._runs_left -= 1
        tried = self._run_script(change, what)
        if isinstance(tried, TrialResult):
            return _summarized(tried, self._total, self._room)
        self.reruns = tried is not None
        self.failed = self.failed or tried
        return None


def _together(made: tuple[AdviceCandidate, ...]) -> ScriptChange:
    return reduce(or_, (one.change for one in made), ScriptChange())


def _summarized(tried: TrialResult, total: int, room: int, *, fails: bool = False) -> _Run:
    if AllocatorConfig.read(tried.trace.settings).backend == ARENA:
        raise UsageError(
            "memfit cannot try allocator settings: they have no effect in a script that uses memfit.arena."
        )
    run = ReplayedRun.of(tried.trace, summarize(tried.trace))
    facts = RunFacts.of(tried.trace, run.found)
    outcomes = {"": _outcome(run, total, room, fails=fails)}
    if facts.conf and not (fails and run.on(total).fits):  # a replay that differs from the run proves nothing
        outcomes[facts.conf] = _outcome(replace(run, conf=facts.conf), total, room)
    return _Run(facts, tried.models, outcomes)


def _outcome(run: ReplayedRun, total: int, room: int, *, fails: bool = False) -> _Outcome:
    calls, needs = run.unlimited.calls_per_step, run.needs(total, fails=fails)
    # As the verdict counts: with less room PyTorch would release its cache, but a dry run does not show that.
    fits = not fails and needs.bytes + run.taken <= room and run.on(room).fits
    return _Outcome(
        needs,
        run.reserved(),
        CallRates().seconds(calls) if calls is not None else None,
        fits if room else None,
    )
