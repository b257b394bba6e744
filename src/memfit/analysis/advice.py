"""At most three pieces of advice, each carried out before it is given: what costs least first.

trace ──> candidates ──> run again, or replay ──> saves enough? ──> advice; what it led to is the next trace

Each builds on those above it, so that what they save adds up. Running again is the caller's: a trace that
came from elsewhere names a script, and nobody asked for that to be run.
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

_MOST = 3
_WORTH = 0.01
"""Of what a run needs, that a piece of advice saves at least."""
_MUCH = 0.1
"""Of what is allocated at the peak: more activations are worth some time."""
_EXPANDABLE = "expandable_segments:True"
_STRATEGIES = {
    "checkpointing": ("Checkpointing", "checkpoint the repeated blocks", "a second forward of these blocks"),
    "offload": ("Offload", "offload activations", "host memory, and copies to the host and back"),
}
"""Fields of a ``Plan``, cheapest first: the class of its settings, what it does, what it costs."""


@dataclass(frozen=True, slots=True)
class ScriptChange:
    """What a script is run with that it does not do itself; none of it touches the training loop."""

    strategies: tuple[str, ...] = ()
    """Fields of a ``Plan``, each with its default settings."""
    fused: bool = False
    """PyTorch's optimizers take ``fused=True`` where the script does not say which kind it wants."""
    conf: str = ""
    """``PYTORCH_ALLOC_CONF``; empty for the script's own. It is replayed, not run."""


@dataclass(frozen=True, slots=True)
class TrialResult:
    """A run that came to its end."""

    trace: Trace
    models: tuple[str, ...] = ()
    """Classes of the models that strategies were applied to."""


RunScript = Callable[[ScriptChange, str], TrialResult | ScriptEnd | None]
"""Runs the script again where memory does not end: with a change, and what that is called. Returns how the
script ended where that was not its end; None where it is not to be run."""


def ran_to_completion(end: ScriptEnd) -> bool:
    """Say whether a script has shown all that it needs: it came to its end, or to that of its steps."""
    return end.reason in ("steps", "end") and not end.exit_code


def find_advice(trace: Trace, found: DryRun, run: RunScript = lambda _change, _what: None) -> DryRun:
    """Say what would lower what a run needs, until it fits if it does not.

    Args:
        trace: of the run as it is.
        found: its summary.
        run: by default nothing is run, and only settings are tried.

    Returns:
        The summary with ``advice``, ``in_all`` and ``untried``, as far as it came where somebody interrupts.
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
    """What may be worth trying."""

    change: ScriptChange
    what: str
    how: str
    costs: str = ""
    """Empty where a replay tells."""


@dataclass(frozen=True, slots=True)
class AdviceAttempt:
    """A run under a change, and how it fares."""

    trial: TrialResult
    found: DryRun
    asked: Requests
    change: ScriptChange
    roomy: Replay
    """Where memory does not end."""

    @classmethod
    def of(cls, trial: TrialResult, change: ScriptChange) -> "AdviceAttempt":
        """Look at a run that has been made under a change.

        Raises:
            MemfitError: it had another allocator than PyTorch's own, or its history does not tell enough.
        """
        if AllocatorConfig.read(trial.trace.settings).backend == ARENA:
            raise UsageError("The script used memfit.arena: PyTorch's allocator settings have no effect.")
        asked = read_requests(trial.trace)
        return cls(trial, summarize(trial.trace), asked, change, _replay(trial, asked, change, NO_LIMIT))

    def reserved(self) -> Figure:
        """Return the most bytes reserved where memory does not end."""
        sure = least_certain(note for note in self.trial.trace.notes if note.sizes)
        most = self.roomy.peak_reserved
        seen = not self.change.conf and most == self.found.peak_reserved  # by the run, which had no model
        return Figure(most, sure if seen else worst(sure, Provenance.SIMULATED))

    def seconds(self) -> float | None:
        """Return what calls of the driver take in a steady step; None if too few steps were seen."""
        calls = self.roomy.calls_per_step
        return CallRates().seconds(calls) if calls is not None else None

    def fits(self, total: int) -> bool | None:
        """Say whether it fits so many bytes of device; None for 0, where there is none."""
        return _replay(self.trial, self.asked, self.change, total).fits if total else None

    def under(self, candidate: AdviceCandidate, run: RunScript) -> "AdviceAttempt | ScriptEnd | None":
        """Try something more: settings by a replay, all else by running again, with what comes of that."""
        change = candidate.change
        if change.conf != self.change.conf:
            return replace(self, change=change, roomy=_replay(self.trial, self.asked, change, NO_LIMIT))
        tried = run(change, candidate.what)
        return AdviceAttempt.of(tried, change) if isinstance(tried, TrialResult) else tried


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
    """Yield the answer anew whenever more of it is known."""
    first: TrialResult | ScriptEnd | None = TrialResult(trace) if ran_to_completion(trace.end) else trace.end
    if answer.verdict in ("out of memory", "does not fit"):
        first = run(ScriptChange(), "with unlimited memory")
    if not isinstance(first, TrialResult):
        yield replace(answer, untried=first)
        return
    now, total = AdviceAttempt.of(first, ScriptChange()), trace.device.total.bytes
    context, reserved, fits = trace.device.context, now.reserved(), now.fits(total)
    in_all = Figure(reserved.bytes + context.bytes, worst(reserved.provenance, context.provenance))
    yield (answer := replace(answer, in_all=in_all))
    # What fits as it is, or has no device, is told whatever saves; what does not, as much as it takes to fit.
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
    """Say what settings cost."""
    if before is None or after is None:
        return "an unknown time: fewer than two steps completed"
    if after <= before:
        return "no time in a steady step"
    return f"{1000 * (after - before):.1f} ms per step (assumed) in driver calls"


def _candidates(now: AdviceAttempt) -> Iterator[AdviceCandidate]:
    """Yield what may lower a peak and is not done already, cheapest first."""
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
