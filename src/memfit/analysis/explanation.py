"""From a trace to everything that ``memfit explain`` says of it."""

from dataclasses import dataclass

from memfit.allocator.timeline import timeline
from memfit.analysis.advice import advised
from memfit.analysis.attribution import attribute
from memfit.analysis.below_peak import below_peak
from memfit.analysis.breakdown import held, moment
from memfit.analysis.fragmentation import fragmentation
from memfit.analysis.phase_ledger import ledger
from memfit.analysis.summary import summary
from memfit.records import Breakdown, DryRun, Fragmentation, Moment, PhaseChange, Trace


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who holds the memory of a run, when, and from which line."""

    summary: DryRun
    below_peak: tuple[Moment, ...]
    """What would limit the run next, highest first."""
    at: str
    """The moment: ``peak``, a phase, or a training step."""
    held: Breakdown
    """Who holds what is allocated then."""
    ledger: tuple[PhaseChange, ...]
    """What each phase of the first steps changed."""
    fragmentation: Fragmentation | None
    """What of the reserved memory was not asked for, where that was wanted."""


def explanation(trace: Trace, at: str = "peak", *, fragments: bool = False) -> Explanation:
    """Explain a trace.

    Args:
        trace: what was recorded.
        at: ``peak``, a phase (``backward``), or a training step (``2``): the moment in it that holds most.
        fragments: tell apart what is reserved and not requested, too.

    Raises:
        UsageError: there is no such moment.
        FileFormatError: the history contradicts itself.
    """
    line = timeline(trace)
    attribution = attribute(trace, line)
    found = summary(trace, line, attribution)
    settings = advised(trace, found)  # nothing is run for it
    return Explanation(
        summary=settings if settings.advice else found,
        below_peak=below_peak(trace, line),
        at=at,
        held=held(trace, line, attribution, moment(trace, line, at)),
        ledger=ledger(trace, line, attribution),
        fragmentation=fragmentation(trace) if fragments else None,
    )
