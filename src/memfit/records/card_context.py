"""Records of what a process holds on a card, step by step: made by ``context.py``, shown by ``report``."""

from dataclasses import dataclass

from memfit.records.trace import Machine


@dataclass(frozen=True, slots=True)
class ContextStage:
    """What a process held on a card after using it a little more. Bytes."""

    what: str
    """What it had just done: "first matmul"."""
    allocated: int
    reserved: int
    """By PyTorch's allocator."""
    process: int
    """By the process in all."""

    @property
    def outside(self) -> int:
        """Bytes outside PyTorch's allocator: the context, kernels, libraries."""
        return max(0, self.process - self.reserved)


@dataclass(frozen=True, slots=True)
class ContextTrial:
    """The same stages with something changed."""

    what: str
    """The change, as it is written: "CUDA_MODULE_LOADING=EAGER"."""
    why: str
    stages: tuple[ContextStage, ...]
    failed: str = ""
    """The last lines of the error; then there are no stages."""


@dataclass(frozen=True, slots=True)
class ContextReport:
    """What a process holds on a card, step by step, and what changes it."""

    card: str
    """As the driver names it."""
    driver: str
    """Its version; empty where NVML does not say."""
    cuda: str
    """The newest that the driver serves."""
    torch: str
    total: int
    """Bytes of the card, as cudaMemGetInfo reports them."""
    machine: Machine
    """``CARD``, or ``REHEARSAL``: then nothing here was measured."""
    way: str
    """How the process's bytes were found."""
    day: str
    """When: "2026-05-17"."""
    stages: tuple[ContextStage, ...]
    trials: tuple[ContextTrial, ...]
