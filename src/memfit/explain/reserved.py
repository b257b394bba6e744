"""The records of what reserved bytes are used for: made by ``fragmentation.py``, shown by ``report``."""

from dataclasses import astuple, dataclass

from memfit.records import Category, Place, Provenance


@dataclass(frozen=True, slots=True)
class Reserved:
    """Bytes of segments, told apart: the fields sum to what is reserved."""

    requested: int = 0
    """What live tensors were asked for with."""
    rounding: int = 0
    """Of live blocks, beyond that: up to 512 bytes, or a division of a power of two."""
    unsplit: int = 0
    """Of live blocks, beyond that: a remainder that was not worth a block of its own."""
    awaiting_free: int = 0
    """Blocks that are freed and that another stream still uses."""
    holes: int = 0
    """Free blocks in segments that other blocks keep in use: ``empty_cache`` gives none of these back, but in
    expandable segments the whole handles within them."""
    cached: int = 0
    """Segments that are wholly free: ``empty_cache`` gives them back."""

    @property
    def allocated(self) -> int:
        """``torch.cuda.memory_allocated()``."""
        return self.requested + self.rounding + self.unsplit

    @property
    def total(self) -> int:
        """``torch.cuda.memory_reserved()``."""
        return self.allocated + self.awaiting_free + self.holes + self.cached

    def __add__(self, other: "Reserved") -> "Reserved":
        return Reserved(*map(int.__add__, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Pin:
    """A block in use next to a hole: while it is there, its segment cannot be given back."""

    address: int
    size: int
    category: Category
    state: str
    """``active_allocated`` or ``active_awaiting_free``."""
    born: Place | None
    """Where it was allocated; None if that was before the history."""
    freed: Place | None
    """Where its free was requested; None if it was held to the end, or freed before the history."""


@dataclass(frozen=True, slots=True)
class Hole:
    """A free block in a segment that other blocks keep in use."""

    address: int
    size: int
    kind: str
    """``small`` or ``large``: the pool."""
    segment: int
    """Address. Of expandable segments, each range that is mapped without a gap counts as one."""
    segment_size: int
    expandable: bool
    blocks: int
    """Blocks in use in the segment."""
    in_use: int
    """Bytes of them."""
    pins: tuple[Pin, ...]
    """Those before and after the hole, in this order; none where the segment begins or ends with it."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What the reserved bytes were used for at a moment."""

    name: str
    events: int
    """How many events had happened."""
    place: Place
    small: Reserved
    """Of the small pool: requests up to 1 MiB."""
    large: Reserved
    holes: tuple[Hole, ...]
    """The largest few, largest first."""

    @property
    def reserved(self) -> Reserved:
        """Of both pools."""
        return self.small + self.large


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """What is reserved and not asked for, and what keeps it from being given back."""

    moments: tuple[Moment, ...]
    provenance: Provenance
    """Of every figure but the totals reserved, which are exact as far as sizes are."""
    not_applicable: str = ""
    """Why there are no moments; otherwise empty."""
