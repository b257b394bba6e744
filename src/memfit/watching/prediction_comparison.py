"""Compare the memory of a run with its prediction, step by step and stage by stage, in lines of text."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from memfit.records import MachineKind, Stage
from memfit.units import format_bytes
from memfit.watching.measure_run_stages import MeasuredRunStage, PeakBounds, RunStageMeter
from memfit.watching.prediction import PlannedPeak, PredictedStep, Prediction, StepMemory, is_stage_compared

TOLERANCE = 1.0
"""Percentage by which a step or a stage may differ from its prediction before memfit reports it."""


class PredictionComparer:
    """Compares one run with its prediction.

    Args:
        prediction: of the run.
        stages: measures the stages of the run; None to compare steps by their number only.
    """

    def __init__(self, prediction: Prediction, stages: RunStageMeter | None) -> None:
        self._prediction, self._stages = prediction, stages
        self._times: Counter[Stage] = Counter()  # stages that have ended
        self._times_at_end: Counter[Stage] = Counter()  # after the last training step
        self._rows: dict[str, tuple[PeakBounds | None, int | None]] = {}
        self._reported: set[tuple[str, bool]] = set()
        """Kinds of what has differed, and whether it was more than predicted."""
        self.expected: StepMemory | None = None
        """The prediction for the last step; once the run is over, its peak is that of all that was run."""

    def step(self, step: int, measured: StepMemory) -> Iterator[str]:
        """Yield what differs in a step that has just ended, and in the stages since the one before.

        Of each stage, and of the training steps, the first is reported that needs more, and the first that
        needs less.
        """
        peak = PeakBounds(measured.peak, measured.peak)
        if self._stages is not None:
            for ended in self._stages.complete_step(measured):
                yield from self._end(ended)
            peak = self._stages.current.peak
        predicted = self._expected(step)
        self.expected = predicted.memory
        most = predicted.memory.peak if self._stages is None else predicted.so_far
        expected = most, predicted.memory.allocated
        found = _describe_differences(peak, measured.allocated, expected, "step")
        yield from self._report("step", f"step {step:,}", found)

    def finish(self, now: StepMemory, *, ran_out: bool) -> Iterator[str]:
        """Yield what differs in the stages since the last step. The run is over."""
        if self._stages is not None:
            *ended, last = self._stages.finish(now, ran_out=ran_out)
            for each in ended:
                yield from self._end(each, trained=True)
            yield from self._end(last, trained=True, is_over=True)

    def table(self) -> list[str]:
        """Return a line for each stage, below headings; none if stages are not compared."""
        if self._stages is None:
            return []
        rows = dict(self._rows)
        times: Counter[Stage] = Counter()
        for each in self._prediction.stages:
            times[each.stage] += 1
            rows.setdefault(_name(each.stage, times[each.stage]), (None, each.peak))
        return _stage_table_lines(rows)

    def _expected(self, step: int) -> PredictedStep:
        """Return the prediction for a step that has just ended: by its number in its stage, if it has one."""
        if self._stages is not None:
            current = self._stages.current
            predicted = self._prediction.at_stage(Stage.TRAINING, self._times[Stage.TRAINING] + 1)
            if current.stage is Stage.TRAINING and predicted is not None:
                return predicted.steps[min(current.steps, len(predicted.steps)) - 1]
        return self._prediction.at(step)

    def _end(
        self, measured: MeasuredRunStage, *, trained: bool = False, is_over: bool = False
    ) -> Iterator[str]:
        """Yield what differs in a stage that has ended; if ``trained``, after the last training step.

        If ``is_over``, it ended with the run, when the script frees everything.
        """
        stage = measured.stage
        if not is_stage_compared(stage, measured.steps):
            return
        self._times[stage] += 1
        name = _name(stage, self._times[stage])
        at_end = trained and stage is not Stage.TRAINING
        times = self._times_at_end if at_end else self._times
        if at_end:
            times[stage] += 1
        predicted = self._prediction.at_stage(stage, times[stage], trained=at_end)
        before, most = self._rows.get(name, (None, None))
        peak = measured.peak if before is None else measured.peak.and_of(before)
        if predicted is None:
            self._rows[name] = peak, None
            return
        self._rows[name] = peak, max(predicted.peak, most or 0)
        if stage is not Stage.TRAINING:  # step() compares that
            if at_end and self.expected is not None:
                self.expected = replace(self.expected, peak=max(self.expected.peak, predicted.peak))
            expected = predicted.peak, None if is_over else predicted.allocated
            found = _describe_differences(measured.peak, measured.allocated, expected, "stage")
            yield from self._report(stage, f"{stage} {self._times[stage]:,}", found)

    def _report(self, kind: str, name: str, found: list[tuple[float, str]]) -> Iterator[str]:
        """Yield what differs, unless steps or stages of a kind have differed in that direction before."""
        which = kind, any(more > 0 for more, _ in found)
        if found and which not in self._reported:
            self._reported.add(which)
            yield f"{name}: {'; '.join(text for _, text in found)}"


class PeakComparer:
    """Compares the peak of a run with the one that its plan predicts for its first steps."""

    def __init__(self, planned: PlannedPeak) -> None:
        self._planned = planned
        self._reported = False
        self.expected: StepMemory | None = None
        """The prediction, with what is measured for what it does not say."""

    def step(self, step: int, measured: StepMemory) -> Iterator[str]:
        """Yield what differs: the first step whose peak is more than predicted."""
        self.expected = StepMemory(self._planned.allocated, measured.allocated)
        peak, predicted = PeakBounds(measured.peak, measured.peak), (self._planned.allocated, None)
        for more, text in _describe_differences(peak, measured.allocated, predicted, "step"):
            if more > 0 and not self._reported:
                self._reported = True
                yield f"step {step:,}: {text}"

    def finish(self, _now: StepMemory, *, ran_out: bool) -> Iterator[str]:  # noqa: ARG002 - as Comparison
        """Yield nothing: the last line has the peak."""
        yield from ()

    def table(self) -> list[str]:
        """Return no lines: a plan predicts no stages."""
        return []


def _name(stage: Stage, time: int) -> str:
    """Return what users call a stage; training after another stage may need more than before it."""
    return f"{stage}, later" if stage is Stage.TRAINING and time > 1 else stage


_ORIGINS = {
    MachineKind.GHOST: "on the ghost",
    MachineKind.CARD: "recorded on a GPU",
    MachineKind.REHEARSAL: "in a rehearsal",
    MachineKind.UNKNOWN: "",
}


def _excess_percent(measured: int, predicted: int) -> float:
    """Return the percentage by which measured bytes exceed the predicted ones; inf if the prediction is 0."""
    if predicted:
        return 100 * (measured - predicted) / predicted
    return math.inf if measured else 0.0


def step_progress_text(step: int, measured: StepMemory, predicted: StepMemory | None) -> str:
    """Return the progress of a run and its peak, in one line.

    >>> step_progress_text(
    ...     7, StepMemory(peak=3 << 30, allocated=1 << 30), StepMemory(peak=2 << 30, allocated=1 << 30)
    ... )
    'memfit: step 7 · peak 3.0 GiB measured · 2.0 GiB predicted · +50.00 %'
    """
    line = f"memfit: step {step:,} · peak {format_bytes(measured.peak)} measured"
    if predicted is None:
        return f"{line} · {format_bytes(measured.allocated)} at the end of the step"
    more = _excess_percent(measured.peak, predicted.peak)
    return f"{line} · {format_bytes(predicted.peak)} predicted" + _percent(" · ", more)


def _describe_differences(
    peak: PeakBounds, allocated: int, predicted: tuple[int, int | None], of: str
) -> list[tuple[float, str]]:
    """Describe what differs from its prediction by more than the tolerance, each after the excess in percent.

    Args:
        peak: measured bytes, of a step or a stage.
        allocated: bytes allocated at its end.
        predicted: the same, the latter None if it is not compared.
        of: ``step`` or ``stage``.

    >>> _describe_differences(PeakBounds(3 << 30, 3 << 30), 1 << 30, (2 << 30, 1 << 30), "step")
    [(50.0, 'peak 3.0 GiB measured, 2.0 GiB predicted, +50.00 %')]
    >>> _describe_differences(PeakBounds(1 << 30, 3 << 30), 1 << 30, (2 << 30, 0), "step")
    [(inf, 'allocated at the end of the step 1.0 GiB measured, 0 B predicted')]
    """
    pairs = [("peak", peak, predicted[0])]
    if predicted[1] is not None:
        pairs.append((f"allocated at the end of the {of}", PeakBounds(allocated, allocated), predicted[1]))
    found = []
    for what, measured, expected in pairs:
        more = _excess_percent(measured.nearest(expected), expected)
        if abs(more) > TOLERANCE:
            shown = f"{_peak_bounds_text(measured, expected)} measured, {format_bytes(expected)} predicted"
            found.append((more, f"{what} {shown}{_percent(', ', more)}"))
    return found


def _peak_bounds_text(peak: PeakBounds, predicted: int | None) -> str:
    """Return what is known of a peak; of one that is higher than predicted, how high it is at least.

    >>> (
    ...     _peak_bounds_text(PeakBounds(1 << 30, 1 << 30), 0),
    ...     _peak_bounds_text(PeakBounds(1 << 20, 1 << 30), 1 << 21),
    ... )
    ('1.0 GiB', 'at most 1.0 GiB')
    >>> _peak_bounds_text(PeakBounds(1 << 20, 1 << 30), 1 << 10)
    'at least 1.0 MiB'
    """
    if peak.low == peak.high:
        return format_bytes(peak.high)
    if predicted is not None and peak.low > predicted:
        return f"at least {format_bytes(peak.low)}"
    return f"at most {format_bytes(peak.high)}"


def _stage_table_lines(rows: Mapping[str, tuple[PeakBounds | None, int | None]]) -> list[str]:
    """Return a line for each stage, below headings.

    Args:
        rows: by name, the measured peak and the predicted one; None where the stage does not occur.

    >>> for line in _stage_table_lines(
    ...     {"saving": (PeakBounds(3 << 30, 3 << 30), 2 << 30), "loading": (None, 0)}
    ... ):
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
                more = _percent("", _excess_percent(nearest, predicted))
        shown = "-" if predicted is None else format_bytes(predicted)
        cells.append((name, shown, "-" if measured is None else _peak_bounds_text(measured, predicted), more))
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    return [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip()
        for row in cells
    ]


def _percent(separator: str, more: float) -> str:
    return f"{separator}{more:+.2f} %" if math.isfinite(more) else ""


def prediction_source_text(prediction: Prediction | PlannedPeak, torch: str) -> str:
    """Describe where a prediction comes from, and how its torch version differs from this run's.

    >>> from memfit.records import Provenance
    >>> prediction_source_text(Prediction((), (), Provenance.EXACT, MachineKind.GHOST, "2.14.1"), "2.14.1")
    'predicted: exact on the ghost'
    """
    if isinstance(prediction, PlannedPeak):
        return "predicted by the plan"
    made = f"predicted: {prediction.provenance} {_ORIGINS[prediction.machine]}".strip()
    if prediction.torch in ("", torch):
        return made
    return f"{made} with torch {prediction.torch}; this run uses torch {torch}"
