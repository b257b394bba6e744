"""The answer of a dry run: the verdict, the peak, what holds it, and what would lower it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from memfit.records.provenance import Figure, Note
from memfit.records.trace import DeviceUse, ScriptEnd, ScriptLocation


@dataclass(frozen=True, slots=True)
class Term:
    """One row of the summary."""

    name: str
    figure: Figure


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """An allocation that failed for good."""

    place: ScriptLocation
    requested: int
    free: int
    """Bytes the device still had free."""
    shortfall: int
    """Bytes missing, had the allocator's cache been of no use: ``segment size - free``."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Whether a training step leaves memory as it found it, judged at the end of each step."""

    steady_from: int | None
    """The first step that ended with as much held as every later one; None if the last two differ."""
    bytes_per_step: int
    """Bytes requested and held at the end of the last step, less those at the end of the one before; for
    a leak, of those alone that have outlived a whole step."""
    line: str
    """``file:line`` that holds most of what leaked; otherwise empty."""
    leak: bool
    """Whether what grows outlives the step that allocated it. Otherwise it may be batches of varying size."""


@dataclass(frozen=True, slots=True)
class Advice:
    """What lowers what a run needs: it was tried."""

    what: str
    how: str
    """What to write."""
    costs: str
    saves: Figure
    """Bytes of the process at its peak, beyond what the advice above it saves."""
    needs: Figure
    """Bytes of the process at its peak, with it and all advice above it."""
    fits: bool | None
    """Whether the run then fits its device; None where it has none."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """The answer to: what would this script use?"""

    verdict: str
    """``fits``, ``does not fit`` (an allocation failed and the script carried on), ``out of memory``, or
    ``unknown``: the script failed or was interrupted, or this is a snapshot, which names no device."""
    device: DeviceUse
    steps: int
    peak_allocated: int
    peak_reserved: int
    peak_process: Figure
    peak_place: ScriptLocation
    terms: tuple[Term, ...]
    """Rows that sum to the process's peak, outermost last."""
    out_of_memory: OutOfMemory | None
    growth: Growth
    end: ScriptEnd
    notes: tuple[Note, ...]
    versions: Mapping[str, str]
    command: tuple[str, ...] = field(default=())
    advice: tuple[Advice, ...] | None = None
    """What would lower the peak; None where nobody asked."""
    in_all: Figure | None = None
    """Bytes of the process at its peak where memory does not end, if that is known: advice counts from it."""
    untried: ScriptEnd | None = None
    """Why advice that needs a run of its own is missing: how the script ended, or that run (``refused``: it
    could not be run, or not with what was to be tried)."""
