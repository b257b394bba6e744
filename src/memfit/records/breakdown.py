"""What holds the memory of a run: the records behind ``memfit explain``."""

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
    """Bytes that share a category, module, line or op."""

    name: str
    """A category; a module's path, repetition folded (``blocks.0-11.mlp``); ``file:line``; an op."""
    bytes: int
    """As requested; what blocks have beyond that is the row ``rounding``."""
    blocks: int
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class LiveAllocation:
    """An allocation that is alive at a moment."""

    requested: int
    block: int
    """Bytes: rounded, with an unsplit remainder."""
    category: str
    module: str
    op: str
    line: str
    name: str
    """What held it, if anything did: ``weight.grad``, ``mat1 of AddmmBackward0``."""
    dtype: str
    shape: tuple[int, ...] | None
    born: ScriptLocation


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """A moment of a run at which much memory is allocated."""

    event: int
    """The moment is just after this event."""
    place: ScriptLocation
    allocated: int


@dataclass(frozen=True, slots=True)
class Breakdown:
    """What holds the memory allocated at a moment."""

    event: int
    """The moment is just after this event."""
    place: ScriptLocation
    allocated: int
    """Bytes; the rows of each kind sum to them."""
    rows: dict[GroupBy, tuple[BreakdownRow, ...]]
    """Largest first; ``rounding`` and ``before the history`` last."""
    largest: tuple[LiveAllocation, ...]


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """The change of allocated memory in one stretch of a phase. Bytes of blocks."""

    step: int
    """Training step, from 1; 0 before the first."""
    phase: Phase
    by_category: tuple[tuple[str, int], ...]
    """The change of each category; only those that changed."""
    change: int
    """The sum of these changes."""
    peak: int
    """The most that was allocated during the stretch."""
    after: int
    """Allocated at its end."""
