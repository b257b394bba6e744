"""What a dry run says that each training step will hold, to be compared with what it does hold."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from memfit.allocator.timeline import timeline
from memfit.analysis.location import least_certain
from memfit.errors import UsageError
from memfit.records import Action, Machine, MarkKind, Provenance, Trace


@dataclass(frozen=True, slots=True)
class Counted:
    """What PyTorch's allocator has counted when a training step ends. Bytes."""

    peak: int
    """``torch.cuda.max_memory_allocated()``: since the script last reset it, or since the beginning."""
    allocated: int
    """``torch.cuda.memory_allocated()``."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is expected of a run, step by step."""

    steps: tuple[Counted, ...]
    """At least one."""
    provenance: Provenance
    machine: Machine
    """What it was made on."""
    torch: str
    """The version that it was made with."""

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Read a prediction from the trace of a dry run, or of a recording.

        Raises:
            UsageError: it holds no training step, or begins in the middle of a run, as a post-mortem does.
            FileFormatError: its history contradicts itself.
        """
        if np.any(trace.events.action == Action.EARLIER):
            raise UsageError(
                "The trace to compare with begins in the middle of a run, as a post-mortem does. Compare "
                "with that of a dry run: memfit dry-run -o run.memfit."
            )
        line = timeline(trace)
        level = np.concatenate((np.zeros(1, np.int64), line.allocated))  # before each event, and after all
        resets = [0, *(mark.position for mark in trace.marks if mark.kind is MarkKind.RESET_PEAK)]
        steps = []
        for mark in trace.marks:
            if mark.kind is MarkKind.TRAINING_STEP:
                since = max(reset for reset in resets if reset <= mark.position)
                peak = level[since : mark.position + 1].max()
                steps.append(Counted(int(peak), int(level[mark.position])))
        if not steps:
            raise UsageError(
                "The trace to compare with holds no training step. Make one: memfit dry-run -o run.memfit."
            )
        return cls(
            tuple(steps),
            least_certain(note for note in trace.notes if note.sizes),
            trace.device.machine,
            trace.versions.get("torch", ""),
        )

    def at(self, step: int) -> Counted:
        """Return what is expected of a step, from 1; after the last that was tried, what that one held."""
        return self.steps[min(step, len(self.steps)) - 1]
