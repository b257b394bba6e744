"""The public JSON of ``memfit explain --fragmentation``; docs/explain.schema.json is made from it.

That of a dry run (``schema.py``), and what of the reserved memory was not asked for.
"""

from dataclasses import astuple

import msgspec

from memfit.explain import reserved
from memfit.records import DryRun
from memfit.report.schema import Result, encode, to_public


class Place(msgspec.Struct, frozen=True):
    """Where the script was."""

    step: int
    phase: str
    module: str
    op: str
    line: str


class Reserved(msgspec.Struct, frozen=True):
    """Bytes: the first three sum to ``allocated``, and this with the next three to ``reserved``."""

    requested: int
    rounding: int
    unsplit: int
    """Remainders that were not worth a block of their own."""
    awaiting_free: int
    """Freed, and another stream still uses them."""
    holes: int
    """Free blocks in segments that other blocks keep in use."""
    cached: int
    """Segments that are wholly free."""
    allocated: int
    """torch.cuda.memory_allocated()."""
    reserved: int
    """torch.cuda.memory_reserved()."""


class Pin(msgspec.Struct, frozen=True):
    """A block in use beside a hole."""

    address: int
    size: int
    category: str
    state: str
    """As torch.cuda.memory_snapshot() spells it."""
    born: Place | None
    """null: before the history began."""
    freed: Place | None
    """null: held to the end, or freed before the history began."""


class Hole(msgspec.Struct, frozen=True):
    """A free block in a segment that other blocks keep in use."""

    address: int
    size: int
    kind: str
    """``small`` or ``large``: the pool."""
    segment: int
    """Its address."""
    segment_size: int
    expandable: bool
    """Whether it is mapped memory: then empty_cache gives back the whole handles within the hole."""
    blocks: int
    """Blocks in use in the segment."""
    in_use: int
    """Bytes of them."""
    pins: tuple[Pin, ...]


class Moment(msgspec.Struct, frozen=True):
    """What the reserved bytes were used for at a moment."""

    name: str
    """``peak reserved``, ``peak allocated`` or ``the end``."""
    events: int
    """Of the history, that had happened."""
    place: Place
    all: Reserved
    small: Reserved
    large: Reserved
    holes: tuple[Hole, ...]
    """The largest few."""


class Fragmentation(msgspec.Struct, frozen=True):
    """What is reserved and not asked for, and what keeps it from being given back."""

    provenance: str
    not_applicable: str
    """Why there are no moments; otherwise empty."""
    moments: tuple[Moment, ...]


class Explained(Result, frozen=True):
    """What ``memfit explain --fragmentation --json`` writes."""

    fragmentation: Fragmentation


def to_json(result: DryRun, found: reserved.Fragmentation) -> bytes:
    """Encode both as one public JSON."""
    return encode(
        Explained(
            **msgspec.structs.asdict(to_public(result)),
            fragmentation=Fragmentation(
                found.provenance, found.not_applicable, tuple(map(_moment, found.moments))
            ),
        )
    )


def _moment(moment: reserved.Moment) -> Moment:
    return Moment(
        moment.name,
        moment.events,
        Place(*astuple(moment.place)),
        _reserved(moment.reserved),
        _reserved(moment.small),
        _reserved(moment.large),
        tuple(map(_hole, moment.holes)),
    )


def _reserved(split: reserved.Reserved) -> Reserved:
    return Reserved(
        split.requested,
        split.rounding,
        split.unsplit,
        split.awaiting_free,
        split.holes,
        split.cached,
        split.allocated,
        split.total,
    )


def _hole(hole: reserved.Hole) -> Hole:
    return Hole(
        hole.address,
        hole.size,
        hole.kind,
        hole.segment,
        hole.segment_size,
        hole.expandable,
        hole.blocks,
        hole.in_use,
        tuple(map(_pin, hole.pins)),
    )


def _pin(pin: reserved.Pin) -> Pin:
    return Pin(
        pin.address,
        pin.size,
        pin.category.name.lower(),
        pin.state,
        None if pin.born is None else Place(*astuple(pin.born)),
        None if pin.freed is None else Place(*astuple(pin.freed)),
    )
