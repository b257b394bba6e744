"""The public JSON of ``memfit pack``; docs/pack.schema.json is generated from it."""

import msgspec

from memfit.packing.best_packing import Packing
from memfit.packing.run_packing import PoolPacking, RunPacking
from memfit.records import DEFAULT_POOL, Provenance, worst
from memfit.report.schema.encoding import SCHEMA_VERSION, encode


class AmountJson(msgspec.Struct, frozen=True):
    """An amount of memory: bytes for a run, the table's own units for a table."""

    amount: int
    provenance: Provenance


class ReservedJson(msgspec.Struct, frozen=True):
    """The peak that PyTorch's allocator reserves over the whole run under a setting."""

    setting: str
    """A value of PYTORCH_ALLOC_CONF; an empty string is the default."""
    amount: int
    provenance: Provenance


class ArenaJson(msgspec.Struct, frozen=True):
    """The arena of one stream and memory pool. A table has a single arena."""

    stream: int
    pool: tuple[int, int]
    """[0, 0] is the default pool."""
    buffers: int
    planned: int
    bound: int
    how: str
    """The packer that found the packing."""


class PackingJson(msgspec.Struct, frozen=True):
    """What ``memfit pack --json`` writes."""

    schema: int
    capacity: int | None
    """The capacity requested; null if none was."""
    fits: bool | None
    """Whether the packing is within the capacity; null without one."""
    step: int | None
    """The training step that is packed, from 1, on behalf of all steps like it; 0 for the whole run, null
    for a table."""
    planned: AmountJson
    """The size of all arenas together."""
    bound: AmountJson
    """A lower bound: no packing is smaller. If it exceeds the capacity, no packing fits."""
    live: AmountJson
    """The most that is live at once."""
    unshared: AmountJson
    """The sum of all buffers: the size if no memory were reused."""
    reserved: tuple[ReservedJson, ...]
    """For comparison, what PyTorch's allocator reserves without a plan; empty for a table."""
    arenas: tuple[ArenaJson, ...]


def to_json(found: Packing | RunPacking, capacity: int | None) -> bytes:
    """Encode a packing, searched for within a capacity if there is one, as one line of ASCII."""
    return encode(_public(found, capacity))


def _public(found: Packing | RunPacking, capacity: int | None) -> PackingJson:
    run = found if isinstance(found, RunPacking) else None
    arenas = (PoolPacking(0, DEFAULT_POOL, found),) if isinstance(found, Packing) else found.arenas
    provenance = run.sure if run else Provenance.EXACT
    planned = worst(Provenance.SIMULATED, provenance)
    return PackingJson(
        schema=SCHEMA_VERSION,
        capacity=capacity,
        fits=None if capacity is None else found.height <= capacity,
        step=run.step if run else None,
        planned=AmountJson(found.height, planned),
        bound=AmountJson(found.bound, provenance),
        live=AmountJson(found.live, provenance),
        unshared=AmountJson(found.unshared, provenance),
        reserved=tuple(
            ReservedJson(row.setting.name, row.replay.peak_reserved, planned)
            for row in (run.reserved if run else ())
        ),
        arenas=tuple(
            ArenaJson(
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
