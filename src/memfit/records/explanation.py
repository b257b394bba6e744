"""Everything that ``memfit explain`` reports of one run."""

from dataclasses import dataclass

from memfit.records.breakdown import Breakdown, MemoryPeak, PhaseChange
from memfit.records.dry_run import DryRun
from memfit.records.fragmentation import Fragmentation


@dataclass(frozen=True, slots=True)
class Explanation:
    """What holds the memory of a run, when, and from which line."""

    summary: DryRun
    below_peak: tuple[MemoryPeak, ...]
    """The peaks that would limit the run next, highest first."""
    at: str
    """The moment of ``held``: ``peak``, a phase, or a training step."""
    held: Breakdown
    """What holds the memory allocated at that moment."""
    ledger: tuple[PhaseChange, ...]
    """What each phase of the first steps changed."""
    fragmentation: Fragmentation | None
    """What the reserved bytes are used for; None if the caller did not ask for it."""
