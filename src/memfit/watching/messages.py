"""The lines that a watch prints on standard error."""

import math

from memfit.records import Machine
from memfit.units import format_bytes
from memfit.watching.prediction import Prediction, StepMemory

_ORIGINS = {
    Machine.GHOST: "on the ghost",
    Machine.CARD: "recorded on a GPU",
    Machine.REHEARSAL: "in a rehearsal",
    Machine.UNKNOWN: "",
}


def excess(measured: int, predicted: int) -> float:
    """Return the percentage by which measured bytes exceed the predicted ones; inf if the prediction is 0."""
    if predicted:
        return 100 * (measured - predicted) / predicted
    return math.inf if measured else 0.0


def progress(step: int, measured: StepMemory, predicted: StepMemory | None) -> str:
    """Return the progress of a run and its peak, in one line.

    >>> progress(7, StepMemory(peak=3 << 30, allocated=1 << 30), StepMemory(peak=2 << 30, allocated=1 << 30))
    'memfit: step 7 · peak 3.0 GiB measured · 2.0 GiB predicted · +50.00 %'
    """
    line = f"memfit: step {step:,} · peak {format_bytes(measured.peak)} measured"
    if predicted is None:
        return f"{line} · {format_bytes(measured.allocated)} at the end of the step"
    more = excess(measured.peak, predicted.peak)
    return f"{line} · {format_bytes(predicted.peak)} predicted" + _percent(" · ", more)


def differences(measured: StepMemory, predicted: StepMemory, tolerance: float) -> str:
    """Describe what differs from its prediction by more than a tolerance in percent; empty if nothing does.

    >>> differences(
    ...     StepMemory(peak=3 << 30, allocated=1 << 30), StepMemory(peak=2 << 30, allocated=1 << 30), 1.0
    ... )
    'peak 3.0 GiB measured, 2.0 GiB predicted, +50.00 %'
    >>> differences(StepMemory(peak=3 << 30, allocated=1 << 30), StepMemory(peak=3 << 30, allocated=0), 1.0)
    'allocated at the end of the step 1.0 GiB measured, 0 B predicted'
    """
    pairs = (
        ("peak", measured.peak, predicted.peak),
        ("allocated at the end of the step", measured.allocated, predicted.allocated),
    )
    return "; ".join(
        f"{what} {format_bytes(found)} measured, {format_bytes(expected)} predicted{_percent(', ', more)}"
        for what, found, expected in pairs
        if abs(more := excess(found, expected)) > tolerance
    )


def _percent(separator: str, more: float) -> str:
    return f"{separator}{more:+.2f} %" if math.isfinite(more) else ""


def source(prediction: Prediction, torch: str) -> str:
    """Describe where a prediction comes from, and how its torch version differs from this run's.

    >>> from memfit.records import Provenance
    >>> source(Prediction((), Provenance.EXACT, Machine.GHOST, "2.14.1"), "2.14.1")
    'predicted: exact on the ghost'
    """
    made = f"predicted: {prediction.provenance} {_ORIGINS[prediction.machine]}".strip()
    if prediction.torch in ("", torch):
        return made
    return f"{made} with torch {prediction.torch}; this run uses torch {torch}"
