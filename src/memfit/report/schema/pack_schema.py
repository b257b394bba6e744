"""The public JSON of ``memfit pack``; docs/pack.schema.json is made from it.

What ``schema.py`` promises of a dry run's holds of it, too.
"""

import json

import msgspec

from memfit.packing.best_packing import Packing
from memfit.packing.run_packing import Arena, Packed
from memfit.records import DEFAULT_POOL, Provenance, worst
from memfit.report.schema.dry_run_schema import SCHEMA


class Amount(msgspec.Struct, frozen=True):
    """Bytes of a run; of a table whatever its sizes are counted in."""

    amount: int
    provenance: Provenance


class Reserved(msgspec.Struct, frozen=True):
    """The most that PyTorch's allocator reserves in the whole run under a setting."""

    setting: str
    """A value of PYTORCH_ALLOC_CONF; an empty string is the default."""
    amount: int
    provenance: Provenance


class Planned(msgspec.Struct, frozen=True):
    """An arena: what one stream and pool has for itself. A table is one."""

    stream: int
    pool: tuple[int, int]
    """[0, 0] is no private one."""
    buffers: int
    planned: int
    bound: int
    how: str
    """What found it."""


class Packs(msgspec.Struct, frozen=True):
    """What ``memfit pack --json`` writes."""

    schema: int
    capacity: int | None
    """What was said to be enough."""
    fits: bool | None
    """Whether what is planned is within it; null if nothing was said."""
    step: int | None
    """The training step that is packed, from 1, for all that repeat it; 0: the whole run; null: a table."""
    planned: Amount
    """Of all arenas."""
    bound: Amount
    """No arenas are smaller. That none fits is proved if this is above the capacity."""
    live: Amount
    """What lives at once, at most."""
    unshared: Amount
    """What it would be if each buffer had memory of its own."""
    reserved: tuple[Reserved, ...]
    """Beside it, what the run takes without a plan; nothing for a table."""
    arenas: tuple[Planned, ...]


def to_json(found: Packing | Packed, capacity: int | None) -> bytes:
    """Encode a packing, found for a capacity: one line of ASCII."""
    return json.dumps(msgspec.to_builtins(_public(found, capacity)), separators=(",", ":")).encode("ascii")


def _public(found: Packing | Packed, capacity: int | None) -> Packs:
    run = found if isinstance(found, Packed) else None
    arenas = (Arena(0, DEFAULT_POOL, found),) if isinstance(found, Packing) else found.arenas
    sure = run.sure if run else Provenance.EXACT
    planned = worst(Provenance.SIMULATED, sure)
    return Packs(
        schema=SCHEMA,
        capacity=capacity,
        fits=None if capacity is None else found.height <= capacity,
        step=run.step if run else None,
        planned=Amount(found.height, planned),
        bound=Amount(found.bound, sure),
        live=Amount(found.live, sure),
        unshared=Amount(found.unshared, sure),
        reserved=tuple(
            Reserved(row.setting.name, row.replay.peak_reserved, planned)
            for row in (run.reserved if run else ())
        ),
        arenas=tuple(
            Planned(
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
