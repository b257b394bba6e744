"""At most three pieces of advice, each carried out before it is given: what costs least first.

trace ──> candidates ──> run again, or replay ──> saves enough? ──> advice; what it led to is the next trace

Each builds on those above it, so that what they save adds up. Running again is the caller's: a trace that
came from elsewhere names a script, and nobody asked for that to be run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from memfit.allocator.compare import Setting
from memfit.allocator.config import AllocatorConfig, of_the_environment, of_the_script
from memfit.allocator.replay import Replay, replay
from memfit.allocator.requests import Requests, requests
from memfit.analysis.comparison import torch_version
from memfit.analysis.peak import summarize
from memfit.analysis.place import how_sure
from memfit.devices import NO_LIMIT
from memfit.errors import MemfitError
from memfit.records import Advice, DryRun, Figure, Phase, Provenance, Trace, worst

_MOST = 3
_WORTH = 0.01
"""Of what a run needs, that a piece of advice saves at least."""
_MUCH = 0.1
"""Of what is allocated at the peak: more activations are worth some time."""
_EXPANDABLE = "expandable_segments:True"
_STRATEGIES = {
    "checkpointing": ("Checkpointing", "checkpoint the repeated blocks", "the blocks' forward once more"),
    "offload": ("Offload", "offload activations", "host memory for them, and copies there and back"),
}
"""Fields of a ``Plan``, cheapest first: the class of its settings, what it does, what it costs."""


@dataclass(frozen=True, slots=True)
class Change:
    """What a script is run with that it does not do itself; none of it touches the training loop."""

    strategies: tuple[str, ...] = ()
    """Fields of a ``Plan``, each with its default settings."""
    fused: bool = False
    """PyTorch's optimizers take ``fused=True`` where the script does not say which kind it wants."""
    conf: str = ""
    """``PYTORCH_ALLOC_CONF``; empty for the script's own. It is replayed, not run."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may be worth trying."""

    change: Change
    what: str
    how: str
    costs: str


def advice(
    trace: Trace, found: DryRun, total: int, run: Callable[[Candidate], Trace | None] = lambda _: None
) -> tuple[Advice, ...]:
    """Say what would lower what a run needs, until it fits if it does not.

    Args:
        trace: of the run as it is, on a device where it came to its end.
        found: its summary.
        total: bytes of the device that it is to fit; 0 if there is none.
        run: runs the script again where memory does not end, None if that fails; by default nothing is run,
            and only settings are tried.
    """
    if trace.end.reason not in ("steps", "end"):
        return ()
    try:
        return tuple(islice(_advice(Attempt(trace, found, requests(trace), Change(), total), run), _MOST))
    except MemfitError:  # the trace does not tell what a replay asks for, or its allocator is not PyTorch's
        return ()


@dataclass(frozen=True, slots=True)
class Attempt:
    """A run under a change, and how it fares."""

    trace: Trace
    found: DryRun
    asked: Requests
    change: Change
    total: int
    """Bytes of the device that it is to fit; 0 if there is none."""

    def reserved(self) -> Figure:
        """Return the most bytes reserved where memory does not end."""
        sure = how_sure(note for note in self.trace.notes if note.sizes)
        return Figure(
            self._replay(NO_LIMIT).peak_reserved,
            worst(sure, Provenance.SIMULATED) if self.change.conf else sure,
        )

    def fits(self) -> bool | None:
        """Say whether it fits its device; None if there is none."""
        return self._replay(self.total).fits if self.total else None

    def under(self, candidate: Candidate, run: Callable[[Candidate], Trace | None]) -> "Attempt | None":
        """Try something more: settings by a replay, all else by running again; None if that fails."""
        if candidate.change.conf != self.change.conf:
            return replace(self, change=candidate.change)
        trace = run(candidate)
        if trace is None:
            return None
        return Attempt(trace, summarize(trace), requests(trace), candidate.change, self.total)

    def _replay(self, total: int) -> Replay:
        settings, device = self.trace.settings, self.trace.device
        setting = Setting(self.change.conf or of_the_environment(settings), script=of_the_script(settings))
        return replay(
            self.asked,
            setting.config(),
            total=total,
            taken=device.context.bytes + device.in_use,
            version=torch_version(self.trace),
        )


def _advice(now: Attempt, run: Callable[[Candidate], Trace | None]) -> Iterator[Advice]:
    context = now.trace.device.context
    reserved, fits = now.reserved(), now.fits()
    least, fitted = _WORTH * (reserved.bytes + context.bytes), fits
    while fitted or not fits:
        for candidate in _candidates(now):
            then = now.under(candidate, run)
            less = then.reserved() if then is not None else reserved
            if then is not None and reserved.bytes - less.bytes >= least:
                break
        else:
            return
        fits = then.fits()
        saves = Figure(reserved.bytes - less.bytes, less.provenance)
        needs = Figure(less.bytes + context.bytes, worst(less.provenance, context.provenance))
        yield Advice(candidate.what, candidate.how, candidate.costs, saves, needs, fits)
        now, reserved = then, less


def _candidates(now: Attempt) -> Iterator[Candidate]:
    """Yield what may lower a peak and is not done already, cheapest first."""
    change, settings = now.change, now.trace.settings
    at_peak = {term.name: term.figure.bytes for term in now.found.terms}
    if not change.conf and not AllocatorConfig.read(settings).expandable_segments:
        conf = ",".join(filter(None, (of_the_environment(settings), _EXPANDABLE)))
        yield Candidate(
            replace(change, conf=conf),
            "expandable segments",
            f"PYTORCH_ALLOC_CONF={conf}",
            "nothing in a steady step",
        )
    if now.found.peak_place.phase is Phase.OPTIMIZER and not change.fused:
        yield Candidate(
            replace(change, fused=True),
            "fused optimizer",
            "fused=True where the optimizer is made",
            "no time, but last bits may differ",
        )
    if at_peak["activations"] > _MUCH * at_peak["allocated"]:
        for name, (_, what, costs) in _STRATEGIES.items():
            if name not in change.strategies:
                strategies = (*change.strategies, name)
                plan = ", ".join(f"memfit.{_STRATEGIES[one][0]}()" for one in strategies)
                how = f"memfit.apply(model, [{plan}])  # once the model is made"
                yield Candidate(replace(change, strategies=strategies), what, how, costs)
