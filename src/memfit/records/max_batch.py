"""The largest batch with which a script fits, and the runs that show it."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from memfit.records.printable_result import PrintableResult
from memfit.records.provenance import Figure
from memfit.records.step_time import StepTime
from memfit.records.trace import DeviceUse, ScriptLocation


class BatchLimit(StrEnum):
    """Why no larger batch was found."""

    MEMORY = "memory"  # the next larger one runs out of memory
    DATA = "data"  # there are no more samples
    FLAT = "flat"  # the peak does not depend on the batch size
    RUNS = "runs"  # memfit made as many runs as it may


@dataclass(frozen=True, slots=True)
class BatchRun:
    """The script with batches of one size, run on the ghost with the memory of the budget."""

    size: int
    """Samples in a batch."""
    fits: bool
    """Whether no allocation failed."""
    needs: Figure
    """Bytes of the process on the smallest GPU on which it is known to fit."""
    allocated: Figure
    """Peak of allocated bytes; if it does not fit, from a run with unlimited memory."""
    steps: int
    """Training steps completed, in the run that ``allocated`` is from."""
    place: ScriptLocation
    """Where most was allocated."""
    step_time: StepTime | None = None
    """How long a step takes; None if that is not known."""


@dataclass(frozen=True, slots=True, repr=False)
class MaxBatch(PrintableResult):
    """The largest batch size with which a script fits a budget."""

    json_description = "What ``memfit max-batch --json`` writes."

    device: DeviceUse
    """Its memory is the budget."""
    runs: tuple[BatchRun, ...]
    """Every size that was run, in ascending order."""
    as_written: int
    """The script's own batch size."""
    largest: int | None
    """The largest batch size that fits; None if none does."""
    fastest: int | None
    """The batch size that fits and takes clearly less time for a sample than ``largest``; otherwise
    ``largest``. None if one of the times is not known."""
    limit: BatchLimit
    multiple: int
    """Batch sizes looked for are multiples of it."""
    how: str
    """What to write for the largest batch size, and what is there now; empty if nothing changes."""
    where: str
    """``file:line`` to be changed, if known; otherwise empty."""
    per_sample: Figure | None
    """Bytes allocated for each sample at the peak; None if no two runs show it."""
    remarks: tuple[str, ...]
    """Sentences about what the figures assume."""
    command: tuple[str, ...]
    versions: Mapping[str, str]

    @property
    def budget(self) -> int:
        """Bytes that the process may use, the CUDA context included."""
        return self.device.total.bytes - self.device.in_use

    def run(self, size: int) -> BatchRun | None:
        """Return the run with a batch size; None if there was none."""
        return next((run for run in self.runs if run.size == size), None)
