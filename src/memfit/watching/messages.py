"""The lines that a watch prints on standard error."""

import math
from collections.abc import Mapping

from memfit.records import Machine
from memfit.units import format_bytes
from memfit.watching.measured_stages import PeakBounds
from memfit.watching.prediction import PlannedPeak, Prediction, StepMemory

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


def differences(
    peak: PeakBounds, allocated: int, predicted: tuple[int, int | None], tolerance: float, of: str
) -> list[tuple[float, str]]:
    """Describe what differs from its prediction by more than a tolerance, each after the excess in percent.

    Args:
        peak: measured bytes, of a step or a stage.
        allocated: bytes allocated at its end.
        predicted: the same, the latter None if it is not compared.
        tolerance: in percent.
        of: ``step`` or ``stage``.

    >>> differences(PeakBounds(3 << 30, 3 << 30), 1 << 30, (2 << 30, 1 << 30), 1.0, "step")
    [(50.0, 'peak 3.0 GiB measured, 2.0 GiB predicted, +50.00 %')]
    >>> differences(PeakBounds(1 << 30, 3 << 30), 1 << 30, (2 << 30, 0), 1.0, "step")
    [(inf, 'allocated at the end of the step 1.0 GiB measured, 0 B predicted')]
    """
    pairs = [("peak", peak, predicted[0])]
    if predicted[1] is not None:
        pairs.append((f"allocated at the end of the {of}", PeakBounds(allocated, allocated), predicted[1]))
    found = []
    for what, measured, expected in pairs:
        more = excess(measured.nearest(expected), expected)
        if abs(more) > tolerance:
            shown = f"{bounds(measured, expected)} measured, {format_bytes(expected)} predicted"
            found.append((more, f"{what} {shown}{_percent(', ', more)}"))
    return found


def bounds(peak: PeakBounds, predicted: int | None) -> str:
    """Return what is known of a peak; of one that is higher than predicted, how high it is at least.

    >>> bounds(PeakBounds(1 << 30, 1 << 30), 0), bounds(PeakBounds(1 << 20, 1 << 30), 1 << 21)
    ('1.0 GiB', 'at most 1.0 GiB')
    >>> bounds(PeakBounds(1 << 20, 1 << 30), 1 << 10)
    'at least 1.0 MiB'
    """
    if peak.low == peak.high:
        return format_bytes(peak.high)
    if predicted is not None and peak.low > predicted:
        return f"at least {format_bytes(peak.low)}"
    return f"at most {format_bytes(peak.high)}"


def stage_table(rows: Mapping[str, tuple[PeakBounds | None, int | None]]) -> list[str]:
    """Return a line for each stage, below headings.

    Args:
        rows: by name, the measured peak and the predicted one; None where the stage does not occur.

    >>> for line in stage_table({"saving": (PeakBounds(3 << 30, 3 << 30), 2 << 30), "loading": (None, 0)}):
    ...     print(line)
    stage    predicted  measured
    saving     2.0 GiB   3.0 GiB  +50.00 %
    loading        0 B         -
    """
    cells = [("stage", "predicted", "measured", "")]
    for name, (measured, predicted) in rows.items():
        more = ""
        if measured is not None and predicted is not None:
            nearest = measured.nearest(predicted)
            if measured.low == measured.high or nearest != predicted:
                more = _percent("", excess(nearest, predicted))
        shown = "-" if predicted is None else format_bytes(predicted)
        cells.append((name, shown, "-" if measured is None else bounds(measured, predicted), more))
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in cells
    ]


def _percent(separator: str, more: float) -> str:
    return f"{separator}{more:+.2f} %" if math.isfinite(more) else ""


def source(prediction: Prediction | PlannedPeak, torch: str) -> str:
    """Describe where a prediction comes from, and how its torch version differs from this run's.

    >>> from memfit.records import Provenance
    >>> source(Prediction((), (), Provenance.EXACT, Machine.GHOST, "2.14.1"), "2.14.1")
    'predicted: exact on the ghost'
    """
    if isinstance(prediction, PlannedPeak):
        return "predicted by the plan"
    made = f"predicted: {prediction.provenance} {_ORIGINS[prediction.machine]}".strip()
    if prediction.torch in ("", torch):
        return made
    return f"{made} with torch {prediction.torch}; this run uses torch {torch}"
