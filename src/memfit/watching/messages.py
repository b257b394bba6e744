"""What a watch says, on standard error."""

import math

from memfit.records import Machine
from memfit.units import format_bytes
from memfit.watching.prediction import Counted, Prediction

_WHERE = {
    Machine.GHOST: "on the ghost",
    Machine.CARD: "recorded on a GPU",
    Machine.REHEARSAL: "of a rehearsal",
    Machine.UNKNOWN: "",
}


def difference(measured: int, predicted: int) -> float:
    """Return by how many percent what was measured exceeds what was predicted; inf where that is nothing."""
    if predicted:
        return 100 * (measured - predicted) / predicted
    return math.inf if measured else 0.0


def state(step: int, measured: Counted, predicted: Counted | None) -> str:
    """Say in a line how far a run is and what it held at most.

    >>> state(7, Counted(peak=3 << 30, allocated=1 << 30), Counted(peak=2 << 30, allocated=1 << 30))
    'memfit: step 7 · peak 3.0 GiB measured · 2.0 GiB predicted · +50.00 %'
    """
    line = f"memfit: step {step:,} · peak {format_bytes(measured.peak)} measured"
    if predicted is None:
        return f"{line} · {format_bytes(measured.allocated)} at its end"
    more = difference(measured.peak, predicted.peak)
    return f"{line} · {format_bytes(predicted.peak)} predicted" + _percent(" · ", more)


def differences(measured: Counted, predicted: Counted, tolerance: float) -> str:
    """Name what differs from its prediction by more than so many percent; empty if nothing does.

    >>> differences(Counted(peak=3 << 30, allocated=1 << 30), Counted(peak=2 << 30, allocated=1 << 30), 1.0)
    'peak 3.0 GiB measured, 2.0 GiB predicted, +50.00 %'
    >>> differences(Counted(peak=3 << 30, allocated=1 << 30), Counted(peak=3 << 30, allocated=0), 1.0)
    'allocated at its end 1.0 GiB measured, 0 B predicted'
    """
    pairs = (
        ("peak", measured.peak, predicted.peak),
        ("allocated at its end", measured.allocated, predicted.allocated),
    )
    return "; ".join(
        f"{what} {format_bytes(found)} measured, {format_bytes(expected)} predicted{_percent(', ', more)}"
        for what, found, expected in pairs
        if abs(more := difference(found, expected)) > tolerance
    )


def _percent(separator: str, more: float) -> str:
    return f"{separator}{more:+.2f} %" if math.isfinite(more) else ""


def source(prediction: Prediction, torch: str) -> str:
    """Say where a prediction comes from, for a run with a version of torch.

    >>> from memfit.records import Provenance
    >>> source(Prediction((), Provenance.EXACT, Machine.GHOST, "2.14.1"), "2.14.1")
    'predicted: exact on the ghost'
    """
    made = f"predicted: {prediction.provenance} {_WHERE[prediction.machine]}".strip()
    if prediction.torch in ("", torch):
        return made
    return f"{made} with torch {prediction.torch}; this is {torch}"
