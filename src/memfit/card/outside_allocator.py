"""Measure what a process holds on a card outside PyTorch's allocator: context, libraries, NCCL, extensions.

    the process's bytes by NVML  ┐
      or: the card's growth      ├─ less what PyTorch has reserved = outside
      or: all bytes in use       ┘

NVML's per-process figure is the most reliable, but not always available: in a container NVML may use the
process ids of another one, and on WSL it reports none. The figure's source names the way that was used.
"""

import os
from dataclasses import dataclass

from memfit.card.detect_card import is_ghost_loaded, pci_bus_id
from memfit.card.nvml import CardMemoryUse, NvmlLibrary
from memfit.records import Figure, ProcessMemory, Provenance

BY_PROCESS = "NVML's figure for this process"
BY_GROWTH = "NVML's figure for the card, minus its figure before this process used the card"
BY_CARD = "cudaMemGetInfo's figure for the card, other processes included (no figure from NVML)"


@dataclass(frozen=True, slots=True)
class MemoryReading(ProcessMemory):
    """The memory in use on a card at one moment. Bytes."""

    others: int
    """Held by other processes; 0 where they cannot be distinguished."""
    way: str
    """How ``process`` was determined: ``BY_PROCESS``, ``BY_GROWTH`` or ``BY_CARD``."""


class OutsideMemoryMeter:
    """Reads the first card repeatedly and keeps the maximum. Create it before CUDA is initialised."""

    def __init__(self) -> None:
        self._nvml = NvmlLibrary.open()
        self._before = self._nvml.usage() if self._nvml else {}
        self._most: MemoryReading | None = None

    def read(self) -> MemoryReading:
        """Read what this process holds now. CUDA must be initialised."""
        import torch

        free, total = torch.cuda.mem_get_info(0)
        index = self._nvml.index_of(pci_bus_id()) if self._nvml else None
        now = self._nvml.usage().get(index) if self._nvml and index is not None else None
        before = self._before.get(index) if index is not None else None
        reading = _reading(
            total - free, torch.cuda.memory_reserved(0), before=before, now=now, pid=os.getpid()
        )
        if self._most is None or reading.outside > self._most.outside:
            self._most = reading
        return reading

    def driver(self) -> str:
        """Return the driver's version, or an empty string without NVML."""
        return self._nvml.driver_version() if self._nvml else ""

    def figure(self) -> Figure:
        """Return the most bytes read outside the allocator."""
        most = self._most or self.read()
        if is_ghost_loaded():
            return Figure(most.outside, Provenance.ASSUMED, "rehearsal: the context configured for the ghost")
        return Figure(most.outside, Provenance.MEASURED, f"{most.way}, minus PyTorch's reserved bytes")


def read_outside_memory(device: int) -> MemoryReading:
    """Read once what this process holds on a card; for a process that had already initialised CUDA."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    taken, reserved = total - free, torch.cuda.memory_reserved(device)
    nvml = NvmlLibrary.open()
    index = nvml.index_of(pci_bus_id(device)) if nvml else None
    now = nvml.usage().get(index) if nvml and index is not None else None
    mine = now.processes.get(os.getpid()) if now is not None else None
    if mine is None:
        return MemoryReading(taken, reserved, 0, BY_CARD)
    return MemoryReading(mine, reserved, max(0, taken - mine), BY_PROCESS)


def _reading(
    taken: int, reserved: int, *, before: CardMemoryUse | None, now: CardMemoryUse | None, pid: int
) -> MemoryReading:
    """Separate this process's bytes from those of others.

    Args:
        taken: total less free bytes of the card, by cudaMemGetInfo.
        reserved: by PyTorch's allocator.
        before: NVML's figures before this process used the card; None without NVML.
        now: its figures now.
        pid: this process's id in its own container.
    """
    if before is None or now is None:
        return MemoryReading(taken, reserved, 0, BY_CARD)
    appeared = {number: held for number, held in now.processes.items() if number not in before.processes}
    # Outside a container our process has another id. If only one process has appeared, it is ours.
    mine = appeared.get(pid, next(iter(appeared.values())) if len(appeared) == 1 else None)
    way = BY_PROCESS
    if mine is None:
        mine, way = now.used - before.used, BY_GROWTH
    return MemoryReading(mine, reserved, max(0, taken - mine), way)
