"""Compare the memory that a run uses with what was predicted: each training step, and each stage."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from memfit.records import Stage
from memfit.watching import messages
from memfit.watching.measured_stages import MeasuredStage, MeasuredStages, PeakBounds
from memfit.watching.prediction import PlannedPeak, PredictedStep, Prediction, StepMemory, is_compared

TOLERANCE = 1.0
"""Percentage by which a step or a stage may differ from its prediction before memfit reports it."""


class Comparison:
    """Compares one run with its prediction.

    Args:
        prediction: of the run.
        stages: measures the stages of the run; None to compare steps by their number only.
    """

    def __init__(self, prediction: Prediction, stages: MeasuredStages | None) -> None:
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
        found = messages.differences(peak, measured.allocated, expected, TOLERANCE, "step")
        yield from self._report("step", f"step {step:,}", found)

    def finish(self, now: StepMemory, *, ran_out: bool) -> Iterator[str]:
        """Yield what differs in the stages since the last step. The run is over.

        Args:
            now: what PyTorch's counters hold.
            ran_out: whether memory has run out since the last step.
        """
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
        return messages.stage_table(rows)

    def _expected(self, step: int) -> PredictedStep:
        """Return the prediction for a step that has just ended: by its number in its stage, if it has one."""
        if self._stages is not None:
            current = self._stages.current
            predicted = self._prediction.at_stage(Stage.TRAINING, self._times[Stage.TRAINING] + 1)
            if current.stage is Stage.TRAINING and predicted is not None:
                return predicted.steps[min(current.steps, len(predicted.steps)) - 1]
        return self._prediction.at(step)

    def _end(self, measured: MeasuredStage, *, trained: bool = False, is_over: bool = False) -> Iterator[str]:
        """Yield what differs in a stage that has ended.

        Args:
            measured: the stage.
            trained: whether it ended after the last training step.
            is_over: whether it ended with the run, in which the script frees everything.
        """
        stage = measured.stage
        if not is_compared(stage, measured.steps):
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
            found = messages.differences(measured.peak, measured.allocated, expected, TOLERANCE, "stage")
            yield from self._report(stage, f"{stage} {self._times[stage]:,}", found)

    def _report(self, kind: str, name: str, found: list[tuple[float, str]]) -> Iterator[str]:
        """Yield what differs, unless steps or stages of a kind have differed in that direction before."""
        which = kind, any(more > 0 for more, _ in found)
        if found and which not in self._reported:
            self._reported.add(which)
            yield f"{name}: {'; '.join(text for _, text in found)}"


class PeakComparison:
    """Compares the peak of a run with the one that its plan predicts for its first steps.

    Args:
        planned: the prediction.
    """

    def __init__(self, planned: PlannedPeak) -> None:
        self._planned = planned
        self._reported = False
        self.expected: StepMemory | None = None
        """The prediction, with what is measured for what it does not say."""

    def step(self, step: int, measured: StepMemory) -> Iterator[str]:
        """Yield what differs: the first step whose peak is more than predicted."""
        self.expected = StepMemory(self._planned.allocated, measured.allocated)
        if not self._reported and messages.excess(measured.peak, self._planned.allocated) > TOLERANCE:
            self._reported = True
            peak = PeakBounds(measured.peak, measured.peak)
            predicted = self._planned.allocated, None
            found = messages.differences(peak, measured.allocated, predicted, TOLERANCE, "step")
            yield f"step {step:,}: {'; '.join(text for _, text in found)}"

    def finish(self, _now: StepMemory, *, ran_out: bool) -> Iterator[str]:  # noqa: ARG002 - as Comparison
        """Yield nothing: the last line has the peak."""
        yield from ()

    def table(self) -> list[str]:
        """Return no lines: a plan predicts no stages."""
        return []


def _name(stage: Stage, time: int) -> str:
    """Return what users call a stage; training after another stage may need more than before it."""
    return f"{stage}, later" if stage is Stage.TRAINING and time > 1 else stage
