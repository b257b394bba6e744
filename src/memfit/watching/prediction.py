"""The memory that a dry run predicts for each training step and stage, to compare with what these use."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from memfit.allocator.timeline import memory_timeline
from memfit.analysis.event_locations import worst_provenance_of_notes
from memfit.analysis.run_stages import StageSpan, stage_spans
from memfit.errors import UsageError
from memfit.records import Action, MachineKind, Mark, MarkKind, Provenance, Stage, Trace


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that PyTorch's allocator reports at the end of a training step."""

    peak: int
    """``torch.cuda.max_memory_allocated()``: since the script last reset it, or since it started."""
    allocated: int
    """``torch.cuda.memory_allocated()``."""


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """The predicted memory of a training step."""

    memory: StepMemory
    so_far: int
    """Most bytes allocated since its stage began, or the run if that has no stages."""


@dataclass(frozen=True, slots=True)
class PredictedStage:
    """The predicted memory of a stage, one of the times that the script enters it."""

    stage: Stage
    peak: int
    """Most bytes allocated in it."""
    allocated: int | None
    """Bytes allocated at its end; None for the last stage, at whose end the script frees everything."""
    steps: tuple[PredictedStep, ...]
    """The training steps that are completed in it."""


@dataclass(frozen=True, slots=True)
class PlannedPeak:
    """The predicted memory of a run under a plan, of whose steps nothing else is known."""

    allocated: int
    """Most bytes allocated in its first training steps."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted memory of a run, step by step."""

    steps: tuple[PredictedStep, ...]
    """At least one."""
    stages: tuple[PredictedStage, ...]
    """Those that are compared, in order; none if the trace is of a run that was ended after a few steps."""
    provenance: Provenance
    machine: MachineKind
    """The machine that the prediction was made on."""
    torch: str
    """The PyTorch version that the prediction was made with."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Derive a prediction from the trace of a dry run or a recording."""
        if len(trace.events) and np.any(trace.events.action == Action.EARLIER):
            raise UsageError(
                "The trace passed as 'prediction' starts in the middle of a run, like the trace of a "
                "post-mortem. Pass the trace of a dry run, made with memfit dry-run -o run.memfit SCRIPT.py."
            )
        line = memory_timeline(trace)
        level = np.concatenate(
            (np.zeros(1, np.int64), line.allocated)
        )  # before each event, and after the last
        spans = stage_spans(trace)
        begins = [span.begin for span in spans if span.stage is Stage.TRAINING]
        steps = _steps(trace.marks, level, begins)
        if not steps:
            raise UsageError(
                "The trace passed as 'prediction' contains no complete training step. Pass the trace of a "
                "dry run, made with memfit dry-run -o run.memfit SCRIPT.py; if the script accumulates "
                "gradients and that was a whole run, with more --batches."
            )
        stages = (_stage(span, level, steps) for span in spans)
        return cls(
            tuple(step for _, step in steps),
            tuple(each for each in stages if is_stage_compared(each.stage, len(each.steps))),
            worst_provenance_of_notes(note for note in trace.notes if note.sizes),
            trace.device.machine,
            trace.versions.get("torch", ""),
        )

    def at(self, step: int) -> PredictedStep:
        """Return the prediction for a step, from 1; steps past the last are predicted to equal it."""
        return self.steps[min(step, len(self.steps)) - 1]

    def at_stage(self, stage: Stage, time: int, *, trained: bool = False) -> PredictedStage | None:
        """Return the prediction for one of the times of a stage; None if the stage is not predicted.

        Times past the last are predicted to equal it.

        Args:
            stage: the stage.
            time: from 1.
            trained: whether to count from the end of the last training: what comes then, such as a final test
                or save, may need something else than the same stage between two epochs.
        """
        last = (
            max((at for at, each in enumerate(self.stages) if each.stage is Stage.TRAINING), default=-1) + 1
        )
        part = self.stages[last:] if trained else self.stages[:last]
        times = [each for each in part if each.stage is stage]
        times = times or [each for each in self.stages if each.stage is stage]
        return times[min(time, len(times)) - 1] if times else None


def is_stage_compared(stage: Stage, steps: int) -> bool:
    """Return whether a time of a stage is compared: setup is not, nor training without a complete step."""
    return steps > 0 if stage is Stage.TRAINING else stage is not Stage.SETUP


def _steps(
    marks: Sequence[Mark], level: npt.NDArray[np.int64], begins: Sequence[int]
) -> list[tuple[int, PredictedStep]]:
    """Return the training steps of a run, each with the position of its end.

    ``level`` has the bytes allocated before each event, and ``begins`` where a stage of training begins.
    """
    # A reset at the position of a step counts as before it.
    order = sorted(marks, key=lambda mark: (mark.position, mark.kind is MarkKind.TRAINING_STEP))
    steps, since, peak = [], 0, 0
    last, so_far = 0, 0
    for mark in order:
        if mark.kind is MarkKind.RESET_PEAK:
            since, peak = mark.position, 0
        elif mark.kind is MarkKind.TRAINING_STEP:
            end = mark.position + 1
            peak = max(peak, int(level[since:end].max()))
            began = max((begin for begin in begins if begin < mark.position), default=0)
            if began > last:
                last, so_far = began, 0
            so_far = max(so_far, int(level[last:end].max()))
            since = last = mark.position
            steps.append((mark.position, PredictedStep(StepMemory(peak, int(level[mark.position])), so_far)))
    return steps


def _stage(
    span: StageSpan, level: npt.NDArray[np.int64], steps: Sequence[tuple[int, PredictedStep]]
) -> PredictedStage:
    inside = tuple(step for end, step in steps if span.begin < end <= span.end)
    peak = int(level[span.begin : span.end + 1].max())
    at_end = int(level[span.end]) if span.end + 1 < len(level) else None
    return PredictedStage(span.stage, peak, at_end, inside)
