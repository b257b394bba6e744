"""The sizes of a packing, of a run or of a table, as ``memfit pack --json`` writes them."""

from dataclasses import dataclass
from typing import Self

from memfit.packing.best_packing import Packing
from memfit.packing.run_packing import PoolPacking, RunPacking
from memfit.records import DEFAULT_POOL, Provenance, worst


@dataclass(frozen=True, slots=True)
class Amount:
    """An amount of memory: bytes for a run, the table's own units for a table."""

    amount: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class ReservedAmount:
    """The peak that PyTorch's allocator reserves over the whole run under a setting."""

    setting: str
    """A value of PYTORCH_ALLOC_CONF; an empty string is the default."""
    amount: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class ArenaSizes:
    """The arena of one stream and memory pool. A table has a single arena."""

    stream: int
    pool: tuple[int, int]
    """[0, 0] is the default pool."""
    buffers: int
    planned: int
    bound: int
    how: str
    """The packer that found the packing."""


@dataclass(frozen=True, slots=True)
class PackingSizes:
    """The sizes of a packing."""

    capacity: int | None
    """The capacity requested; None if none was."""
    fits: bool | None
    """Whether the packing is within the capacity; None without one."""
    step: int | None
    """The training step that is packed, from 1, on behalf of all steps like it; 0 for the whole run, None
    for a table."""
    planned: Amount
    """The size of all arenas together."""
    bound: Amount
    """A lower bound: no packing is smaller. If it exceeds the capacity, no packing fits."""
    live: Amount
    """The most that is live at once."""
    unshared: Amount
    """The sum of all buffers: the size if no memory were reused."""
    reserved: tuple[ReservedAmount, ...]
    """For comparison, what PyTorch's allocator reserves without a plan; empty for a table."""
    arenas: tuple[ArenaSizes, ...]

    @classmethod
    def of(cls, found: Packing | RunPacking, capacity: int | None) -> Self:
        """Return the sizes of a packing, searched for within a capacity if there is one."""
        run = found if isinstance(found, RunPacking) else None
        arenas = (PoolPacking(0, DEFAULT_POOL, found),) if isinstance(found, Packing) else found.arenas
        provenance = run.sure if run else Provenance.EXACT
        planned = worst(Provenance.SIMULATED, provenance)
        return cls(
            capacity=capacity,
            fits=None if capacity is None else found.height <= capacity,
            step=run.step if run else None,
            planned=Amount(found.height, planned),
            bound=Amount(found.bound, provenance),
            live=Amount(found.live, provenance),
            unshared=Amount(found.unshared, provenance),
            reserved=tuple(
                ReservedAmount(row.setting.name, row.replay.peak_reserved, planned)
                for row in (run.reserved if run else ())
            ),
            arenas=tuple(
                ArenaSizes(
                    arena.stream,
                    arena.pool,
                    len(arena.packing.buffers),
                    arena.packing.height,
                    arena.packing.bound,
                    arena.packing.how,
                )
                for arena in arenas
            ),
        )
