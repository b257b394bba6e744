"""Experts on several ranks: what a rank needs if tokens are routed evenly, beside the worst case."""

from dataclasses import replace

from memfit.analysis.summary import summarize
from memfit.analysis.trial_result import RunTrial, TrialResult
from memfit.records import Change, DryRun, Note, Provenance, Trace
from memfit.units import format_bytes, format_gib

_EVEN = "routing=even"


def rests_on_routing(trace: Trace) -> bool:
    """Return whether a size assumes that all tokens of all ranks go to this rank's experts."""
    return any(note.bound == "routing" for note in trace.notes)


def with_even_routing(values: str) -> str:
    """Return the option ``--values`` for a run whose tokens are routed evenly.

    >>> with_even_routing("float=0.5"), with_even_routing("")
    ('float=0.5,routing=even', 'routing=even')
    """
    return ",".join(filter(None, (values, _EVEN)))


def beside_even_routing(most: DryRun, run: RunTrial) -> DryRun:
    """Return a result with a note on what the run needs if tokens are routed evenly.

    Args:
        most: the result of the run in which this rank receives the most.
        run: runs the script with even routing and unlimited memory.
    """
    trial = run(Change(), "even routing")
    if not isinstance(trial, TrialResult):
        return most
    even = summarize(trial.trace)
    text = (
        f"If tokens are routed evenly (--values {_EVEN}), this rank needs "
        f"{format_gib(even.peak_process.bytes)}: {format_bytes(even.peak_allocated)} allocated, "
        f"{format_bytes(even.peak_reserved)} reserved."
    )
    return replace(most, notes=(*most.notes, Note(Provenance.ASSUMED, text, sizes=True)))
