"""The memory of a run compared with a baseline: what grew, what fell, and whether that is too much."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from memfit.records.printable_result import PrintableResult
from memfit.records.provenance import Figure, Provenance


@dataclass(frozen=True, slots=True)
class MemoryBaseline:
    """What a run held at its peak, to compare later runs with. The fields are those of the file."""

    json_description = "What ``memfit check --update`` writes. The fields are those of ``MemoryBaseline``."

    command: tuple[str, ...]
    gpu: str
    memory: int
    """Bytes of the GPU, or of the budget."""
    steps: int
    """Training steps completed."""
    versions: Mapping[str, str]
    phase: str
    module: str
    """Where most was allocated."""
    peak: Mapping[str, int]
    """Peaks of ``allocated``, ``reserved`` and ``process``."""
    terms: Mapping[str, int]
    """What is allocated at the peak by category, and what the process holds outside PyTorch's allocator."""
    modules: Mapping[str, Mapping[str, int]]
    """Requested bytes at the peak, by module and category; the module is empty outside modules."""


@dataclass(frozen=True, slots=True)
class CheckedFigure:
    """A figure of the baseline and of the run."""

    name: str
    """``allocated``, ``reserved`` or ``process`` for a peak; otherwise a term, such as ``parameters``."""
    module: str | None
    """The module that holds it, empty outside modules; None for a figure of the whole run."""
    before: int
    after: int
    provenance: Provenance
    """Of the bytes of the run."""

    @property
    def change(self) -> int:
        """Bytes by which it grew."""
        return self.after - self.before


class CheckVerdict(StrEnum):
    """The outcome of a check."""

    WRITTEN = "written"  # there is nothing to compare with: the baseline was written
    FITS = "fits"  # there is no baseline
    SAME = "same"  # nothing changed by more than the tolerance
    GREW = "grew"
    FELL = "fell"  # something did, and nothing grew
    NO_FIT = "does not fit"


@dataclass(frozen=True, slots=True, repr=False)
class MemoryCheck(PrintableResult):
    """The memory of a run compared with a baseline."""

    json_description = "What ``memfit check --json`` writes."

    verdict: CheckVerdict
    tolerance: float
    """Share of a figure by which it may change."""
    run: MemoryBaseline
    """What this run held; with unlimited memory, if it does not fit."""
    needs: Figure
    """Bytes of the process at its peak; if it does not fit, on the smallest GPU on which it does."""
    peaks: tuple[CheckedFigure, ...] = ()
    """The three peaks, changed or not; empty without a baseline."""
    grew: tuple[CheckedFigure, ...] = ()
    """Peaks, terms and modules that grew by more than the tolerance; of each, the largest change first."""
    fell: tuple[CheckedFigure, ...] = ()
    """Those that fell by more than the tolerance, likewise."""
    differences: tuple[str, ...] = field(default=())
    """Sentences about what else differs from the baseline: versions, the GPU, where the peak is."""

    @property
    def fits(self) -> bool:
        """Whether the script fits its GPU."""
        return self.verdict is not CheckVerdict.NO_FIT

    @property
    def passed(self) -> bool:
        """Whether the run fits, and nothing grew by more than the tolerance."""
        return self.fits and not self.grew
