"""At most three pieces of advice, each carried out before it is given: what costs least first.

trace ──> candidates ──> run again, or replay ──> saves enough? ──> advice; what it led to is the next trace

Each builds on those above it, so that what they save adds up. Running again is the caller's: a trace that
came from elsewhere names a script, and nobody asked for that to be run.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from memfit.allocator.config import AllocatorConfig, of_the_environment
from memfit.analysis.comparison import compare
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
        return tuple(islice(_advice(trace, found, total, run), _MOST))
    except MemfitError:  # the trace does not tell what a replay asks for, or its allocator is not PyTorch's
        return ()


def _advice(
    trace: Trace, found: DryRun, total: int, run: Callable[[Candidate], Trace | None]
) -> Iterator[Advice]:
    change = Change()
    reserved, fits = _reserved(trace, change, total)
    context = trace.device.context
    least, fitted = _WORTH * (reserved.bytes + context.bytes), fits
    while fitted or not fits:
        for candidate in _candidates(trace, found, change):
            again = trace if candidate.change.conf != change.conf else run(candidate)
            if again is None:
                continue
            less, then_fits = _reserved(again, candidate.change, total)
            if reserved.bytes - less.bytes >= least:
                break
        else:
            return
        saves = Figure(reserved.bytes - less.bytes, less.provenance)
        needs = Figure(less.bytes + context.bytes, worst(less.provenance, context.provenance))
        yield Advice(candidate.what, candidate.how, candidate.costs, saves, needs, then_fits)
        found = found if again is trace else summarize(again)
        trace, change, reserved, fits = again, candidate.change, less, then_fits


def _candidates(trace: Trace, found: DryRun, change: Change) -> Iterator[Candidate]:
    """Yield what may lower a peak and is not done already, cheapest first."""
    at_peak = {term.name: term.figure.bytes for term in found.terms}
    if not change.conf and not AllocatorConfig.read(trace.settings).expandable_segments:
        conf = ",".join(filter(None, (of_the_environment(trace.settings), _EXPANDABLE)))
        yield Candidate(
            replace(change, conf=conf),
            "expandable segments",
            f"PYTORCH_ALLOC_CONF={conf}",
            "nothing in a steady step",
        )
    if found.peak_place.phase is Phase.OPTIMIZER and not change.fused:
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
                settings = ", ".join(f"memfit.{_STRATEGIES[one][0]}()" for one in strategies)
                how = f"memfit.apply(model, [{settings}])  # once the model is made"
                yield Candidate(replace(change, strategies=strategies), what, how, costs)


def _reserved(trace: Trace, change: Change, total: int) -> tuple[Figure, bool | None]:
    """Return the most bytes reserved where memory does not end, and whether the run fits a device."""
    confs = (change.conf,) if change.conf else ()
    reserved = compare(trace, confs, memory=NO_LIMIT).outcomes[-1].replay.peak_reserved
    sure = how_sure(note for note in trace.notes if note.sizes)
    fits = compare(trace, confs, memory=total).outcomes[-1].replay.fits if total else None
    return Figure(reserved, worst(sure, *(Provenance.SIMULATED for _ in confs))), fits
