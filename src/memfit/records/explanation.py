"""What holds the memory of a run, and of two runs compared: the records of ``explain`` and ``diff``."""

import html
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from memfit.records.dry_run import DryRun
from memfit.records.fragmentation import Fragmentation
from memfit.records.printable_result import PrintableResult
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
class HighMemoryMoment:
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
class PhaseMemoryChange:
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


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(PrintableResult):
    """What holds the memory of a run, when, and from which line."""

    json_description = "What ``memfit explain --json`` writes."

    summary: DryRun
    below_peak: tuple[HighMemoryMoment, ...]
    """The peaks that would limit the run next, highest first."""
    at: str
    """The moment of ``held``: ``peak``, a phase, or a training step."""
    held: Breakdown
    """What holds the memory allocated at that moment."""
    ledger: tuple[PhaseMemoryChange, ...]
    """What each phase of the first steps changed."""
    fragmentation: Fragmentation | None
    """What the reserved bytes are used for; None if the caller did not ask for it."""
    page: Callable[[], str] | None = field(default=None, compare=False)
    """Creates the HTML report, which the explanation shows as the last line of a notebook cell."""

    def _repr_html_(self) -> str | None:
        if self.page is None:
            return None
        # In an iframe, because the report's styles and security policy apply to a whole page.
        inside = html.escape(self.page(), quote=True)
        return f'<iframe srcdoc="{inside}" sandbox="allow-scripts" width="100%" height="900"></iframe>'


@dataclass(frozen=True, slots=True)
class RowChange:
    """Bytes of one row (a category, module, line or op) in each run."""

    name: str
    before: int
    after: int


@dataclass(frozen=True, slots=True, repr=False)
class RunDifference(PrintableResult):
    """Two runs side by side."""

    json_description = "What ``memfit diff --json`` writes. The fields are those of ``RunDifference``."

    at: str
    """The moment: ``peak``, a phase, or a training step."""
    by: GroupBy
    places: tuple[ScriptLocation, ScriptLocation]
    allocated: tuple[int, int]
    """Bytes at that moment; the rows of each run sum to them."""
    reserved: tuple[int, int]
    """The most that each run reserved."""
    outside: tuple[int, int]
    """What each process held outside PyTorch's allocator: the CUDA context and NCCL."""
    rows: tuple[RowChange, ...]
    """Largest change first; unchanged rows last."""
    names: tuple[str, str] = ("before", "after")
    """Of the runs; two ranks of one job are named as such."""
