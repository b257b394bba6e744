"""NCCL's communicators on the ghost: what each takes of the device, and all together."""

import os
import sys
from collections.abc import Iterable

from memfit.devices import Device
from memfit.ghost.ranks.nccl_memory import KERNELS, NcclCommunicator, nccl_memory
from memfit.ghost.runtime_bindings import CommunicatorUse, GhostRuntime
from memfit.records import Figure, Provenance
from memfit.units import format_bytes


class CommunicatorMemory:
    """Gives the ghost the size of each communicator that the script makes."""

    def __init__(self, ghost: GhostRuntime, device: Device, nproc: int) -> None:
        self._ghost = ghost
        self._device = device
        self._nproc = nproc
        self._made = 0
        self._largest = 0
        ghost.size_communicators(self._size)

    def figure(self) -> Figure | None:
        """Return the most bytes that the communicators have held at one time; None if there were none."""
        if not self._made:
            return None
        what = "communicator" if self._made == 1 else "communicators"
        rule = (
            f"{self._made} {what} (the largest {format_bytes(self._largest)}) by the buffers that NCCL "
            f"2.30.7 allocates, and {format_bytes(KERNELS)} for its kernels"
        )
        return Figure(self._ghost.communicator_bytes() + KERNELS, Provenance.ASSUMED, rule)

    def _size(self, use: CommunicatorUse) -> int:
        """Return the bytes of a communicator: the most that any placement of its ranks would take."""
        if not (use.all_reduces or use.collectives or use.sends or use.receives):
            self._made += 1
            if self._made == 1:
                self._ghost.take(KERNELS)
        size = max(
            nccl_memory(
                NcclCommunicator(
                    ranks=use.ranks,
                    local_ranks=local,
                    rank=use.rank,
                    all_reduces=use.all_reduces,
                    collectives=use.collectives,
                    sends=use.sends,
                    receives=use.receives,
                    shares=use.shares,
                    min_ctas=use.min_ctas or None,
                    max_ctas=use.max_ctas or None,
                ),
                self._device,
                os.environ,
            ).total
            for local in self._local_ranks(use)
        )
        self._largest = max(self._largest, size)
        return size

    def _local_ranks(self, use: CommunicatorUse) -> set[int]:
        """Return how many ranks of a communicator this rank's machine may have: of each group of its size."""
        groups = [ranks for ranks in _process_groups() if len(ranks) == use.ranks]
        own = [(ranks, ranks[use.rank] // self._nproc) for ranks in groups]
        found = {sum(rank // self._nproc == machine for rank in ranks) for ranks, machine in own}
        return found or {min(use.ranks, self._nproc)}


def _process_groups() -> Iterable[list[int]]:
    """Return the ranks of each process group that exists, in the order of their ranks within it."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    for ranks in list(c10d._world.pg_group_ranks.values()) if c10d is not None else ():
        yield sorted(ranks, key=ranks.__getitem__)
