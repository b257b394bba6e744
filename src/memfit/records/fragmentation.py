"""What reserved bytes are used for: computed by ``analysis/fragmentation.py``, shown by ``report``.

These records are also the ``fragmentation`` of ``memfit explain --fragmentation --json``, a stable interface
that docs/explain.schema.json is made from. Fields may be added; none is removed or changes meaning.
"""

from dataclasses import astuple, dataclass, field

from memfit.records.provenance import Provenance
from memfit.records.trace import ScriptLocation


@dataclass(frozen=True, slots=True)
class ReservedBytes:
    """Bytes of segments by use: the first six fields sum to ``reserved``."""

    requested: int = 0
    """Requested for live tensors."""
    rounding: int = 0
    """Rounding of live blocks: up to 512 bytes, or a division of a power of two."""
    unsplit: int = 0
    """Remainders of live blocks that were too small to split off."""
    awaiting_free: int = 0
    """Freed blocks that another stream still uses."""
    holes: int = 0
    """Free blocks in segments that other blocks keep in use: ``empty_cache`` cannot release them, except for
    whole handles of expandable segments."""
    cached: int = 0
    """Wholly free segments, which ``empty_cache`` releases."""
    allocated: int = field(init=False)
    """``torch.cuda.memory_allocated()``: the sum of the first three."""
    reserved: int = field(init=False)
    """``torch.cuda.memory_reserved()``."""

    def __post_init__(self) -> None:
        allocated = self.requested + self.rounding + self.unsplit
        object.__setattr__(self, "allocated", allocated)
        object.__setattr__(self, "reserved", allocated + self.awaiting_free + self.holes + self.cached)

    def __add__(self, other: "ReservedBytes") -> "ReservedBytes":
        return ReservedBytes(*map(int.__add__, astuple(self)[:6], astuple(other)[:6]))


@dataclass(frozen=True, slots=True)
class PinningBlock:
    """A block in use next to a hole: it keeps its segment from being released."""

    address: int
    size: int
    category: str
    """What it holds: a ``Category`` in lower case; ``rest`` if it is from before the history."""
    state: str
    """``active_allocated`` or ``active_awaiting_free``."""
    born: ScriptLocation | None
    """Where the block was allocated; None if that was before the history."""
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
    """Address of the segment. In expandable segments, each contiguous mapped range counts as one."""
    segment_size: int
    expandable: bool
    blocks: int
    """Blocks in use in the segment."""
    in_use: int
    """Bytes of these blocks."""
    pins: tuple[PinningBlock, ...]
    """The blocks before and after the hole, in this order; fewer at the ends of the segment."""


@dataclass(frozen=True, slots=True)
class ReservedMemoryUse:
    """What the reserved bytes were used for at a moment."""

    name: str
    events: int
    """Number of events that had happened."""
    place: ScriptLocation
    all: ReservedBytes
    """Both pools."""
    small: ReservedBytes
    """The small pool: requests up to 1 MiB."""
    large: ReservedBytes
    holes: tuple[Hole, ...]
    """The largest holes, largest first."""


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """What reserved bytes are used for, and what keeps unused ones from being released."""

    provenance: Provenance
    """Provenance of all figures but the reserved totals, which are exact if sizes are."""
    not_applicable: str
    """The reason if there are no moments; otherwise empty."""
    moments: tuple[ReservedMemoryUse, ...]
