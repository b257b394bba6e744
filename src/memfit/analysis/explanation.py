"""From a trace to what ``memfit explain`` reports, but for advice."""

from memfit.allocator.timeline import timeline
from memfit.analysis.attribution import attribute
from memfit.analysis.breakdown import breakdown_at, peak_event
from memfit.analysis.fragmentation import fragmentation
from memfit.analysis.phase_ledger import phase_ledger
from memfit.analysis.secondary_peaks import secondary_peaks
from memfit.analysis.summary import summarize_attributed
from memfit.records import Explanation, Trace


def explain_trace(trace: Trace, at: str = "peak", *, fragments: bool = False) -> Explanation:
    """Explain a trace.

    Args:
        trace: what was recorded.
        at: ``peak``, a phase (``backward``), or a training step (``2``): the moment in it that holds most.
        fragments: also classify the reserved bytes that were not requested.

    Raises:
        UsageError: the run has no such moment.
        FileFormatError: the history contradicts itself.
    """
    line = timeline(trace)
    attribution = attribute(trace, line)
    found = summarize_attributed(trace, line, attribution)
    return Explanation(
        summary=found,
        below_peak=secondary_peaks(trace, line),
        at=at,
        held=breakdown_at(trace, line, attribution, peak_event(trace, line, at)),
        ledger=phase_ledger(trace, line, attribution),
        fragmentation=fragmentation(trace) if fragments else None,
    )
