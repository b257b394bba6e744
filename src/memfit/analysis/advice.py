"""Up to three pieces of advice that lower the peak, each tried before it is reported, cheapest first.

trace ──> candidates ──> rerun or replay ──> saves enough? ──> advice; its result is the next trace

Each piece builds on those before it, so their savings add up. The caller decides whether a script is rerun: a
trace from elsewhere names a script that the user did not ask memfit to run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from memfit.allocator.config import AllocatorConfig, environment_settings, script_settings
from memfit.allocator.replay import replay
from memfit.allocator.requests import Requests, read_requests
from memfit.allocator.setting_outcomes import setting_config
from memfit.analysis.allocator_comparison import torch_version
from memfit.analysis.location import least_certain
from memfit.analysis.summary import summarize
from memfit.devices import NO_LIMIT
from memfit.errors import INTERRUPTED, MemfitError, UsageError
from memfit.records import (
    ARENA,
    Advice,
    AllocatorSetting,
    CallRates,
    DryRun,
    Figure,
    Phase,
    Provenance,
    Replay,
    ScriptEnd,
    Trace,
    worst,
)

_FAILED = ("out of memory", "does not fit")
"""The verdicts on a run that needs more memory than its GPU has."""
_UNLIMITED = "with unlimited memory"
_MOST = 3
_WORTH = 0.01
"""Share of what a run needs that a piece of advice must save."""
_MUCH = 0.1
"""Share of activations at the peak from which saving them is worth some time."""
_EXPANDABLE = "expandable_segments:True"
_STRATEGIES = {
    "checkpointing": ("Checkpointing", "checkpoint the repeated blocks", "a second forward of these blocks"),
    "offload": ("Offload", "offload activations", "host memory, and copies to the host and back"),
}
"""Fields of a ``Plan``, cheapest first: the class of its settings, what it does, its cost."""


@dataclass(frozen=True, slots=True)
class ScriptChange:
    """Changes under which a script is run; none of them edits the training loop."""

    strategies: tuple[str, ...] = ()
    """Fields of a ``Plan``, each with its default settings."""
    fused: bool = False
    """Whether PyTorch's optimizers use ``fused=True`` if the script does not choose an implementation."""
    conf: str = ""
    """``PYTORCH_ALLOC_CONF``; empty for the script's own. Settings are replayed, not run."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The result of a run that completed."""

    trace: Trace
    models: tuple[str, ...] = ()
    """Classes of the models that strategies were applied to."""


RunScript = Callable[[ScriptChange, str], TrialResult | ScriptEnd | None]
"""Reruns the script with unlimited memory, given a change and its name. Returns how the script ended if it
did not complete; None if the script must not be run."""


def ran_to_completion(end: ScriptEnd) -> bool:
    """Return whether a script completed: it ended by itself, or after the requested steps."""
    return end.reason in ("steps", "end") and not end.exit_code


def find_total(found: DryRun, run: RunScript) -> DryRun:
    """Find what a run that does not fit needs in total, by a rerun with unlimited memory.

    Args:
        found: the summary of the unchanged run.
        run: reruns the script with unlimited memory.

    Returns:
        The summary with ``in_all``, or with ``untried`` if the rerun did not complete; unchanged if it fits
        or the user interrupted it.
    """
    if not _needs_more(found):
        return found
    try:
        unlimited = run(ScriptChange(), _UNLIMITED)
    except KeyboardInterrupt:
        return replace(found, untried=ScriptEnd("interrupted", INTERRUPTED))
    if not isinstance(unlimited, TrialResult):
        return replace(found, untried=unlimited)
    return replace(found, in_all=summarize(unlimited.trace).peak_process)


def find_advice(trace: Trace, found: DryRun, run: RunScript = lambda _change, _what: None) -> DryRun:
    """Find changes that lower the memory a run needs; if it does not fit, until it does.

    Args:
        trace: of the unchanged run.
        found: its summary.
        run: reruns the script; by default nothing is run, and only allocator settings are tried.

    Returns:
        The summary with ``advice``, ``in_all`` and ``untried``; with what was found so far if the user
        interrupts.
    """
    answer = replace(found, advice=())
    try:
        for more in _advised(trace, answer, run):
            answer = more
    except KeyboardInterrupt:
        return replace(answer, untried=ScriptEnd("interrupted", INTERRUPTED))
    except MemfitError as error:  # no history to replay, or an allocator that is not PyTorch's
        return replace(answer, untried=ScriptEnd("refused", error.exit_code, str(error)))
    return answer


@dataclass(frozen=True, slots=True)
class AdviceCandidate:
    """A change that may be worth trying."""

    change: ScriptChange
    what: str
    how: str
    costs: str = ""
    """Empty if a replay determines it."""


@dataclass(frozen=True, slots=True)
class AdviceAttempt:
    """A run under a change, and what it needs."""

    trial: TrialResult
    found: DryRun
    asked: Requests
    change: ScriptChange
    roomy: Replay
    """With unlimited memory."""

    @classmethod
    def of(cls, trial: TrialResult, change: ScriptChange) -> "AdviceAttempt":
        """Summarize and replay a run that was made under a change.

        Raises:
            MemfitError: it used another allocator than PyTorch's own, or its history is incomplete.
        """
        if AllocatorConfig.read(trial.trace.settings).backend == ARENA:
            raise UsageError("The script used memfit.arena, so PyTorch's allocator settings have no effect.")
        asked = read_requests(trial.trace)
        return cls(trial, summarize(trial.trace), asked, change, _replay(trial, asked, change, NO_LIMIT))

    def reserved(self) -> Figure:
        """Return the peak of reserved bytes with unlimited memory."""
        sure = least_certain(note for note in self.trial.trace.notes if note.sizes)
        most = self.roomy.peak_reserved
        seen = not self.change.conf and most == self.found.peak_reserved  # in the run itself, not in a model
        return Figure(most, sure if seen else worst(sure, Provenance.SIMULATED))

    def seconds(self) -> float | None:
        """Return the seconds of driver calls in a steady step; None if too few steps completed."""
        calls = self.roomy.calls_per_step
        return CallRates().seconds(calls) if calls is not None else None

    def fits(self, total: int) -> bool | None:
        """Return whether the run fits a device of ``total`` bytes; None for 0, an unknown device."""
        return _replay(self.trial, self.asked, self.change, total).fits if total else None

    def under(self, candidate: AdviceCandidate, run: RunScript) -> "AdviceAttempt | ScriptEnd | None":
        """Try a further change: settings by a replay, anything else by a rerun."""
        change = candidate.change
        if change.conf != self.change.conf:
            return replace(self, change=change, roomy=_replay(self.trial, self.asked, change, NO_LIMIT))
        tried = run(change, candidate.what)
        return AdviceAttempt.of(tried, change) if isinstance(tried, TrialResult) else tried


def _needs_more(found: DryRun) -> bool:
    """Return whether a run with unlimited memory tells what the script needs."""
    return found.verdict in _FAILED and found.end.reason != "interrupted"


def _replay(trial: TrialResult, asked: Requests, change: ScriptChange, total: int) -> Replay:
    settings, device = trial.trace.settings, trial.trace.device
    conf = change.conf or environment_settings(settings)
    setting = AllocatorSetting(conf, script=script_settings(settings))
    return replay(
        asked,
        setting_config(setting),
        total=total,
        taken=device.context.bytes + device.in_use,
        version=torch_version(trial.trace),
    )


def _advised(trace: Trace, answer: DryRun, run: RunScript) -> Iterator[DryRun]:
    """Yield the answer again whenever it grows."""
    first: TrialResult | ScriptEnd | None = TrialResult(trace) if ran_to_completion(trace.end) else trace.end
    if _needs_more(answer):
        first = run(ScriptChange(), _UNLIMITED)
    if not isinstance(first, TrialResult):
        yield replace(answer, untried=first)
        return
    now, total = AdviceAttempt.of(first, ScriptChange()), trace.device.total.bytes
    context, reserved, fits = trace.device.context, now.reserved(), now.fits(total)
    in_all = Figure(reserved.bytes + context.bytes, worst(reserved.provenance, context.provenance))
    yield (answer := replace(answer, in_all=in_all))
    # A run that fits, or has no device, gets all advice; one that does not fit gets enough to make it fit.
    fitted = fits
    while len(answer.advice or ()) < _MOST and (fitted or not fits):
        for candidate in _candidates(now):
            then = now.under(candidate, run)
            if isinstance(then, ScriptEnd):
                yield (answer := replace(answer, untried=answer.untried or then))
            elif then is not None and reserved.bytes - then.reserved().bytes >= _WORTH * in_all.bytes:
                break
        else:
            return
        less, fits = then.reserved(), then.fits(total)
        saves = Figure(reserved.bytes - less.bytes, worst(reserved.provenance, less.provenance))
        needs = Figure(less.bytes + context.bytes, worst(less.provenance, context.provenance))
        how = candidate.how
        if then.change.strategies != now.change.strategies:
            models = then.trial.models
            how += f"  # after creating {'each of ' * (len(models) > 1)}{', '.join(models)}"
        costs = candidate.costs or _costs(now.seconds(), then.seconds())
        advice = Advice(candidate.what, how, costs, saves, needs, fits)
        yield (answer := replace(answer, advice=(*(answer.advice or ()), advice)))
        now, reserved = then, less


def _costs(before: float | None, after: float | None) -> str:
    """Return the cost of settings as text."""
    if before is None or after is None:
        return "an unknown amount of time: fewer than two steps completed"
    if after <= before:
        return "no time in a steady step"
    return f"{1000 * (after - before):.1f} ms per step (assumed) in driver calls"


def _candidates(now: AdviceAttempt) -> Iterator[AdviceCandidate]:
    """Yield changes that may lower the peak and are not made already, cheapest first."""
    change, settings = now.change, now.trial.trace.settings
    at_peak = {term.name: term.figure.bytes for term in now.found.terms}
    if not change.conf and not AllocatorConfig.read(settings).expandable_segments:
        conf = ",".join(filter(None, (environment_settings(settings), _EXPANDABLE)))
        yield AdviceCandidate(
            replace(change, conf=conf),
            "expandable segments",
            f"PYTORCH_ALLOC_CONF={conf}",
        )
    if now.found.peak_place.phase is Phase.OPTIMIZER and not change.fused:
        yield AdviceCandidate(
            replace(change, fused=True),
            "fused optimizer",
            "fused=True when creating the optimizer",
            "no time, but results may differ in their last bits",
        )
    if at_peak["activations"] > _MUCH * at_peak["allocated"]:
        for name, (_, what, costs) in _STRATEGIES.items():
            if name not in change.strategies:
                strategies = (*change.strategies, name)
                plan = ", ".join(f"memfit.{_STRATEGIES[one][0]}()" for one in strategies)
                how = f"memfit.apply(model, [{plan}])"
                yield AdviceCandidate(replace(change, strategies=strategies), what, how, costs)
