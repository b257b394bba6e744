"""Measure the stages of a run while it goes on, with the rules of ``analysis/run_stages.py``.

    marks of the run     step │ BATCH FORWARD EVALUATION ... LOADER_END │ SAVE │ BATCH FORWARD BACKWARD step
    memory is read          x  x                                      x      x                              x

What a forward was for is known when the next training step is complete, or the run over. Until then memfit
keeps the marks, and what PyTorch's counters held where a stage may begin.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from memfit.analysis.loader_passes import LoaderPasses
from memfit.analysis.run_stages import stage_spans_between
from memfit.records import Mark, MarkKind, Stage
from memfit.watching.prediction import StepMemory

_CHECKPOINTS = (MarkKind.SAVE, MarkKind.LOAD)
_CHANGES = (*_CHECKPOINTS, MarkKind.EVALUATION, MarkKind.LOADER_END)
"""Without any of these, and with batches of one loader, the run goes on training."""
_DECIDE = (*_CHANGES, MarkKind.BATCH, MarkKind.FORWARD, MarkKind.BACKWARD)
"""Marks that the analysis reads."""
MOST_MARKS = 20_000
"""Marks kept while no training step is completed; past it, all but some at both ends are dropped."""
_KEPT = 1000


@dataclass(frozen=True, slots=True)
class PeakBounds:
    """What is known of the peak of a part of a run. PyTorch counts one peak since the last reset.

    If it has risen within the part, it is the part's own. Otherwise the part's is not higher.
    """

    low: int
    """Bytes that it has at least, ``high`` at most."""
    high: int

    @classmethod
    def between(cls, before: StepMemory, after: StepMemory) -> Self:
        """Return what the counters say of the time between two readings, without a reset."""
        return cls(after.peak if after.peak > before.peak else after.allocated, after.peak)

    def and_of(self, other: "PeakBounds") -> "PeakBounds":
        """Return what is known of the higher of two peaks."""
        return PeakBounds(max(self.low, other.low), max(self.high, other.high))

    def nearest(self, size: int) -> int:
        """Return the possible peak that is nearest to a number of bytes."""
        return min(max(size, self.low), self.high)


@dataclass(slots=True)
class MeasuredRunStage:
    """The measured memory of a stage, one of the times that the script enters it."""

    stage: Stage
    peak: PeakBounds
    allocated: int
    """Bytes allocated at its end."""
    steps: int = 0
    """Training steps completed in it."""


class RunStageMeter:
    """Measures stages from the marks of a run."""

    def __init__(self, read: Callable[[], StepMemory], records_gradients: Callable[[], bool]) -> None:
        self._read, self._records_gradients = read, records_gradients
        self._now = read()
        self._marks: list[Mark] = []
        self._parts: list[tuple[PeakBounds, int]] = []  # between readings, with what is allocated at the end
        self._last: MarkKind | None = None
        self._loader = -1  # the one read last, if it has not ended
        self._passes = LoaderPasses()
        self._may_change = True
        self.current = MeasuredRunStage(Stage.SETUP, PeakBounds(0, 0), 0)
        """The stage at the end of the last training step."""

    def add(self, kind: MarkKind, index: int) -> None:
        """Add a mark of this moment."""
        if kind is MarkKind.RESET_PEAK:  # it is about to happen
            self._end_part(self._read())
            self._now = StepMemory(self._now.allocated, self._now.allocated)
        if kind not in _DECIDE:
            return
        if self._may_begin_stage(kind, index):
            self._end_part(self._read())
        self._may_change |= kind in _CHANGES or (kind is MarkKind.BATCH and index != self._loader)
        if kind is MarkKind.BATCH:
            self._loader = index
        elif kind is MarkKind.LOADER_END:
            self._loader = -1
        self._last = kind
        self._marks.append(Mark(len(self._parts), kind, index))
        if len(self._marks) > MOST_MARKS:
            self._drop_marks()

    def complete_step(self, now: StepMemory) -> list[MeasuredRunStage]:
        """Note that a training step is complete; return the stages that have ended since the last one."""
        self._end_part(now)
        ended = self._decide(ran_out=False)
        self.current.steps += 1
        self._last = MarkKind.TRAINING_STEP
        return ended

    def finish(self, now: StepMemory, *, ran_out: bool) -> list[MeasuredRunStage]:
        """Return the stages that have ended since the last step, and the current one: the run is over."""
        self._end_part(now)
        return [*self._decide(ran_out=ran_out), self.current]

    def _may_begin_stage(self, kind: MarkKind, index: int) -> bool:
        """Return whether a stage may begin at a mark, so that the counters are to be read.

        Reading them takes as long as dozens of launches. After a training step, they have just been read. A
        pass over a loader is of one stage, as are forwards in a row without gradients.
        """
        if self._last is MarkKind.TRAINING_STEP:
            return False
        if kind is MarkKind.BATCH:
            return index != self._loader or self._last in _CHECKPOINTS
        if kind is MarkKind.FORWARD:
            after_evaluation = self._last is MarkKind.EVALUATION and self._records_gradients()
            return after_evaluation or self._last in (*_CHECKPOINTS, MarkKind.LOADER_END)
        return kind in (*_CHECKPOINTS, MarkKind.LOADER_END)

    def _end_part(self, now: StepMemory) -> None:
        self._parts.append((PeakBounds.between(self._now, now), now.allocated))
        self._now = now

    def _decide(self, *, ran_out: bool) -> list[MeasuredRunStage]:
        """Tell the stages since the last decision apart, and forget their marks."""
        marks, parts = self._marks, self._parts
        self._marks, self._parts = [], []
        ended = []
        stage = self.current.stage
        if not self._may_change and stage is Stage.TRAINING:
            marks = []
        spans = stage_spans_between(marks, len(parts), ran_out=ran_out, stage=stage, passes=self._passes)
        for span in spans:
            for peak, allocated in parts[span.begin : span.end]:
                if span.stage is not self.current.stage:
                    ended.append(self.current)
                    self.current = MeasuredRunStage(span.stage, peak, allocated)
                self.current.peak = self.current.peak.and_of(peak)
                self.current.allocated = allocated
        self._may_change = False
        return ended

    def _drop_marks(self) -> None:
        """Drop the marks in the middle, as if the loop that the script is in were shorter."""
        first, last = self._marks[:_KEPT], self._marks[-_KEPT:]
        begin, end = first[-1].position, last[0].position
        if begin < end:
            peaks, at_ends = zip(*self._parts[begin:end], strict=True)
            self._parts[begin:end] = [(functools.reduce(PeakBounds.and_of, peaks), at_ends[-1])]
            last = [replace(mark, position=mark.position - (end - begin - 1)) for mark in last]
        self._marks = first + last
