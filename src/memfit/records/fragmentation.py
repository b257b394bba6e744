"""The records of what reserved bytes are used for: made by ``fragmentation.py``, shown by ``report``.

As they stand they are also the ``fragmentation`` of ``memfit explain --fragmentation --json``: a promise, of
which docs/explain.schema.json is made. Fields may be added; none is removed or changes meaning.
"""

from dataclasses import astuple, dataclass
from typing import Self

from memfit.records.provenance import Provenance
from memfit.records.trace import ScriptLocation


@dataclass(frozen=True, slots=True)
class ReservedBytes:
    """Bytes of segments, told apart: the first six fields sum to ``reserved``."""

    requested: int
    """What live tensors were asked for with."""
    rounding: int
    """Of live blocks, beyond that: up to 512 bytes, or a division of a power of two."""
    unsplit: int
    """Of live blocks, beyond that: a remainder that was not worth a block of its own."""
    awaiting_free: int
    """Blocks that are freed and that another stream still uses."""
    holes: int
    """Free blocks in segments that other blocks keep in use: ``empty_cache`` gives none of these back, but in
    expandable segments the whole handles within them."""
    cached: int
    """Segments that are wholly free: ``empty_cache`` gives them back."""
    allocated: int
    """``torch.cuda.memory_allocated()``: the first three."""
    reserved: int
    """``torch.cuda.memory_reserved()``."""

    @classmethod
    def of(
        cls,
        *,
        requested: int = 0,
        rounding: int = 0,
        unsplit: int = 0,
        awaiting_free: int = 0,
        holes: int = 0,
        cached: int = 0,
    ) -> Self:
        """Add up what is told apart."""
        allocated = requested + rounding + unsplit
        reserved = allocated + awaiting_free + holes + cached
        return cls(requested, rounding, unsplit, awaiting_free, holes, cached, allocated, reserved)

    def __add__(self, other: "ReservedBytes") -> "ReservedBytes":
        return ReservedBytes(*map(int.__add__, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class PinningBlock:
    """A block in use next to a hole: while it is there, its segment cannot be given back."""

    address: int
    size: int
    category: str
    """What it holds: a ``Category`` in lower case; ``rest`` if it is from before the history."""
    state: str
    """``active_allocated`` or ``active_awaiting_free``."""
    born: ScriptLocation | None
    """Where it was allocated; None if that was before the history."""
    freed: ScriptLocation | None
    """Where its free was requested; None if it was held to the end, or freed before the history."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A free block in a segment that other blocks keep in use."""

    address: int
    size: int
    kind: str
    """``small`` or ``large``: the pool."""
    segment: int
    """Its address. Of expandable segments, each range that is mapped without a gap counts as one."""
    segment_size: int
    expandable: bool
    blocks: int
    """Blocks in use in the segment."""
    in_use: int
    """Bytes of them."""
    pins: tuple[PinningBlock, ...]
    """Those before and after the hole, in this order; none where the segment begins or ends with it."""


@dataclass(frozen=True, slots=True)
class ReservedMemoryUse:
    """What the reserved bytes were used for at a moment."""

    name: str
    events: int
    """How many events had happened."""
    place: ScriptLocation
    all: ReservedBytes
    """Of both pools."""
    small: ReservedBytes
    """Of the small pool: requests up to 1 MiB."""
    large: ReservedBytes
    holes: tuple[Hole, ...]
    """The largest few, largest first."""


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """What is reserved and not asked for, and what keeps it from being given back."""

    provenance: Provenance
    """Of every figure but the totals reserved, which are exact as far as sizes are."""
    not_applicable: str
    """Why there are no moments; otherwise empty."""
    moments: tuple[ReservedMemoryUse, ...]
