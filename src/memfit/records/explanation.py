"""Everything that ``memfit explain`` reports of one run."""

import html
from collections.abc import Callable
from dataclasses import dataclass, field

from memfit.records.breakdown import Breakdown, MemoryPeak, PhaseChange
from memfit.records.dry_run import DryRun
from memfit.records.fragmentation import Fragmentation
from memfit.records.printed_result import PrintedResult


@dataclass(frozen=True, slots=True, repr=False)
class Explanation(PrintedResult):
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
    page: Callable[[], str] | None = field(default=None, compare=False)
    """Creates the HTML report, which the explanation shows as the last line of a notebook cell."""

    def _repr_html_(self) -> str | None:
        if self.page is None:
            return None
        # In an iframe, because the report's styles and security policy apply to a whole page.
        inside = html.escape(self.page(), quote=True)
        return f'<iframe srcdoc="{inside}" sandbox="allow-scripts" width="100%" height="900"></iframe>'
