"""What ``explain`` tells of who holds the memory: the records, and nothing that computes them."""

from dataclasses import dataclass
from enum import StrEnum

from memfit.records.provenance import Provenance
from memfit.records.trace import Phase, ScriptLocation


class GroupBy(StrEnum):
    """What bytes are summed by."""

    CATEGORY = "category"
    MODULE = "module"
    LINE = "line"
    OP = "op"


@dataclass(frozen=True, slots=True)
class BreakdownRow:
    """Bytes that have something in common."""

    name: str
    """A category; a module's path, repetition folded (``blocks.0-11.mlp``); ``file:line``; an op."""
    bytes: int
    """As requested; what blocks have beyond that is the row ``rounding``."""
    blocks: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class LiveAllocation:
    """An allocation that is there at a moment."""

    requested: int
    block: int
    """Bytes: rounded, with an unsplit remainder."""
    category: str
    module: str
    op: str
    line: str
    name: str
    """What held it, if somebody did: ``weight.grad``, ``mat1 of AddmmBackward0``."""
    dtype: str
    shape: tuple[int, ...] | None
    born: ScriptLocation


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """A moment of a run that holds much."""

    event: int
    """The moment is just after this event."""
    place: ScriptLocation
    allocated: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Who holds what is allocated at a moment."""

    event: int
    """The moment is just after this event."""
    place: ScriptLocation
    allocated: int
    """Bytes; the rows of each kind sum to them."""
    rows: dict[GroupBy, tuple[BreakdownRow, ...]]
    """Largest first; ``rounding`` and what was there ``before the history`` last."""
    largest: tuple[LiveAllocation, ...]


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """What one stretch of a phase did to what is allocated. Bytes of blocks."""

    step: int
    """Training step, from 1; 0 before the first."""
    phase: Phase
    by_category: tuple[tuple[str, int], ...]
    """What each category has more, or less, after it than before; only those that changed."""
    change: int
    """Their sum."""
    peak: int
    """The most that was allocated within it."""
    after: int
    """Allocated when it was over."""
