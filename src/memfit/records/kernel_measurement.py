"""How long kernels took on a card (``run/measure_kernel_times.py`` measures it)."""

from dataclasses import dataclass

from memfit.records.step_operations import Operation


@dataclass(frozen=True, slots=True)
class TimedKernel:
    """Something that ran on the card, many times in a row."""

    what: str
    """``product of 4096 x 4096 x 4096, bfloat16``."""
    operations: tuple[Operation, ...]
    """What it runs, in order."""
    seconds: float
    """Of one run: the median."""
    tf32: bool = False
    """Whether matrix products of float32 were computed in TF32."""


@dataclass(frozen=True, slots=True)
class KernelMeasurement:
    """The kernels that ``memfit doctor --time`` timed on a card."""

    card: str
    """As the driver names it: "NVIDIA H200"."""
    driver: str
    cuda: str
    torch: str
    day: str
    """``2026-11-30``."""
    kernels: tuple[TimedKernel, ...]
    skipped: tuple[str, ...] = ()
    """What this card or this PyTorch cannot run, and what was not reached in time."""
