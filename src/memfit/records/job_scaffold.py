"""What a script trains, as Python code."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ObservedJob:
    """The parts of a job, read from a script while it ran."""

    model: tuple[str, ...]
    """Lines that create it: the last is an expression."""
    optimizer: str
    """The expression that creates it from ``model``."""
    loss: tuple[str, ...]
    """The lines of ``loss(model, batch)``."""
    batch: str
    """The expression that makes a batch of ``size`` samples."""
    batch_size: int = 0
    """Samples in the script's own batch; 0 if they are not known."""
    prepare: tuple[str, ...] = ()
    """Lines after the model's creation: its dtype, and what is frozen."""
    max_grad_norm: float | None = None
    imports: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    """What is left to the user, as sentences."""
    model_line: str = ""
    """``file:line`` that creates it."""
    optimizer_line: str = ""
    loss_line: str = ""
    """The line whose backward it is."""


@dataclass(frozen=True, slots=True)
class JobObservation:
    """What came of watching a script."""

    job: ObservedJob | None = None
    reason: str = ""
    """Why there is no job."""


@dataclass(frozen=True, slots=True)
class JobScaffold:
    """A job that memfit wrote for a script."""

    path: str
    """The file."""
    job: ObservedJob
    arguments: tuple[str, ...]
    """Of the command that trains as the script does: the batch size."""
    command: tuple[str, ...]
    """The script's."""
    script_peak: int
    """Bytes that the script allocates at its peak, on the ghost."""
    job_peak: int | None = None
    """The same for the job; None if it does not run."""
    fault: str = ""
    """Why it does not."""
