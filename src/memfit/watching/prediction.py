"""The memory that a dry run predicts for each training step, to compare with what the step uses."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from memfit.allocator.timeline import timeline
from memfit.analysis.location import least_certain
from memfit.errors import UsageError
from memfit.records import Action, Machine, MarkKind, Provenance, Trace


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that PyTorch's allocator reports at the end of a training step."""

    peak: int
    """``torch.cuda.max_memory_allocated()``: since the script last reset it, or since it started."""
    allocated: int
    """``torch.cuda.memory_allocated()``."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted memory of a run, step by step."""

    steps: tuple[StepMemory, ...]
    """At least one."""
    provenance: Provenance
    machine: Machine
    """The machine that the prediction was made on."""
    torch: str
    """The PyTorch version that the prediction was made with."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Derive a prediction from the trace of a dry run or a recording.

        Raises:
            UsageError: the trace holds no training step, or starts in mid-run, as a post-mortem does.
            FileFormatError: its history contradicts itself.
        """
        if np.any(trace.events.action == Action.EARLIER):
            raise UsageError(
                "The trace passed as 'prediction' starts in the middle of a run, like the trace of a "
                "post-mortem. Pass the trace of a dry run, made with memfit dry-run -o run.memfit SCRIPT.py."
            )
        line = timeline(trace)
        level = np.concatenate(
            (np.zeros(1, np.int64), line.allocated)
        )  # before each event, and after the last
        # A reset at the position of a step counts as before it.
        order = sorted(trace.marks, key=lambda mark: (mark.position, mark.kind is MarkKind.TRAINING_STEP))
        steps, since, peak = [], 0, 0
        for mark in order:
            if mark.kind is MarkKind.RESET_PEAK:
                since, peak = mark.position, 0
            elif mark.kind is MarkKind.TRAINING_STEP:
                peak = max(peak, int(level[since : mark.position + 1].max()))
                since = mark.position
                steps.append(StepMemory(peak, int(level[mark.position])))
        if not steps:
            raise UsageError(
                "The trace passed as 'prediction' contains no complete training step. Pass the trace of a "
                "dry run, made with memfit dry-run -o run.memfit SCRIPT.py."
            )
        return cls(
            tuple(steps),
            least_certain(note for note in trace.notes if note.sizes),
            trace.device.machine,
            trace.versions.get("torch", ""),
        )

    def at(self, step: int) -> StepMemory:
        """Return the prediction for a step, from 1; steps past the last are predicted to equal it."""
        return self.steps[min(step, len(self.steps)) - 1]
