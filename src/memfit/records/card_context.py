"""What a process holds on a card, stage by stage (``card/context_measurement.py`` measures it)."""

from dataclasses import dataclass

from memfit.records.trace import MachineKind


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """What a process holds on a card. Bytes."""

    process: int
    """By PyTorch's allocator and outside it."""
    reserved: int
    """Of those, by PyTorch's allocator."""

    @property
    def outside(self) -> int:
        """Bytes outside PyTorch's allocator: the context, kernels, libraries."""
        return max(0, self.process - self.reserved)


@dataclass(frozen=True, slots=True)
class CardContextStage(ProcessMemory):
    """What a process held on a card at one stage of its use. Bytes."""

    allocated: int
    what: str
    """What the process had just done: "first matmul"."""


@dataclass(frozen=True, slots=True)
class CardContextTrial:
    """The same stages under a changed setting."""

    what: str
    """The change, as written: "CUDA_MODULE_LOADING=EAGER"."""
    why: str
    stages: tuple[CardContextStage, ...]
    failed: str = ""
    """The last lines of the error, if the trial failed; then there are no stages."""


@dataclass(frozen=True, slots=True)
class CardContextReport:
    """What a process holds on a card, stage by stage, and what changes it."""

    card: str
    """Its name, from the driver."""
    driver: str
    """The driver's version; empty if NVML does not report it."""
    cuda: str
    """The newest CUDA version that the driver supports."""
    torch: str
    total: int
    """Bytes of the card, as cudaMemGetInfo reports them."""
    machine: MachineKind
    """``CARD``, or ``REHEARSAL``, in which case nothing here was measured."""
    way: str
    """How the process's bytes were measured."""
    day: str
    """The date: "2026-05-17"."""
    stages: tuple[CardContextStage, ...]
    trials: tuple[CardContextTrial, ...] = ()
