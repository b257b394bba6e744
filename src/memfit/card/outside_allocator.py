"""What a process holds on a card outside PyTorch's allocator: the context, libraries, NCCL, extensions.

    process, by NVML          ┐
      or: the card's growth   ├─ less what PyTorch has reserved = outside
      or: everybody's bytes   ┘

NVML's per-process figure is the surest, and not always to be had: in a container it names processes
by the numbers of another one, on WSL it is silent. Each way names itself in the figure's source.
"""

import os
from dataclasses import dataclass

from memfit.card.find import bus_id, is_rehearsal
from memfit.card.nvml import Nvml, Usage
from memfit.records import Figure, Provenance

BY_PROCESS = "NVML's figure for this process"
BY_GROWTH = "NVML's figure for the card, less what it was before this process"
BY_CARD = "cudaMemGetInfo's figure for the card, other processes included (NVML said nothing)"


@dataclass(frozen=True, slots=True)
class Reading:
    """One look at the card. Bytes."""

    process: int
    """Held by this process, PyTorch's allocator and all else."""
    reserved: int
    """Of those, by PyTorch's allocator."""
    others: int
    """Held by other processes; 0 where they cannot be told apart."""
    way: str
    """How ``process`` was found."""

    @property
    def outside(self) -> int:
        """Bytes held by this process outside PyTorch's allocator."""
        return max(0, self.process - self.reserved)


class Outside:
    """Looks at the first card, now and again. Make it before CUDA is initialised."""

    def __init__(self) -> None:
        self._nvml = Nvml.open()
        self._before = self._nvml.usage() if self._nvml else {}
        self._most: Reading | None = None

    def look(self) -> Reading:
        """Read what this process holds now; CUDA is initialised. What was most outside is remembered."""
        import torch

        free, total = torch.cuda.mem_get_info(0)
        index = self._nvml.index_of(bus_id()) if self._nvml else None
        now = self._nvml.usage().get(index) if self._nvml and index is not None else None
        before = self._before.get(index) if index is not None else None
        reading = _reading(
            total - free, torch.cuda.memory_reserved(0), before=before, now=now, pid=os.getpid()
        )
        if self._most is None or reading.outside > self._most.outside:
            self._most = reading
        return reading

    def driver(self) -> str:
        """Return the driver's version, or an empty string where NVML is not there to say it."""
        return self._nvml.driver_version() if self._nvml else ""

    def figure(self) -> Figure:
        """Return the most that was ever seen outside; ``look`` was called at least once."""
        most = self._most or self.look()
        if is_rehearsal():
            return Figure(most.outside, Provenance.ASSUMED, "rehearsal: what the ghost was told to hold")
        return Figure(most.outside, Provenance.MEASURED, f"{most.way}, less PyTorch's reserved")


def glance(device: int) -> Reading:
    """Read what this process holds on a card, once: CUDA was initialised before anybody looked."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    taken, reserved = total - free, torch.cuda.memory_reserved(device)
    nvml = Nvml.open()
    index = nvml.index_of(bus_id(device)) if nvml else None
    now = nvml.usage().get(index) if nvml and index is not None else None
    mine = now.processes.get(os.getpid()) if now is not None else None
    if mine is None:
        return Reading(taken, reserved, 0, BY_CARD)
    return Reading(mine, reserved, max(0, taken - mine), BY_PROCESS)


def _reading(taken: int, reserved: int, *, before: Usage | None, now: Usage | None, pid: int) -> Reading:
    """Tell this process's bytes from the others'.

    Args:
        taken: total less free of the card, by cudaMemGetInfo.
        reserved: by PyTorch's allocator.
        before: NVML's look before this process touched the card; None if NVML was silent.
        now: its look now.
        pid: of this process, in its own container.
    """
    if before is None or now is None:
        return Reading(taken, reserved, 0, BY_CARD)
    appeared = {number: held for number, held in now.processes.items() if number not in before.processes}
    # Seen from outside a container our number is another one; alone in having appeared, it is ours.
    mine = appeared.get(pid, next(iter(appeared.values())) if len(appeared) == 1 else None)
    way = BY_PROCESS
    if mine is None:
        mine, way = now.used - before.used, BY_GROWTH
    return Reading(mine, reserved, max(0, taken - mine), way)
