"""The public JSON of ``memfit explain``; docs/explain.schema.json is generated from it.

It is the JSON of a dry run, with what holds the memory added.
"""

import msgspec

from memfit.records import Breakdown, Explanation, Fragmentation, MemoryPeak, PhaseChange
from memfit.report.schema.dry_run_schema import DryRunJson, public_dry_run
from memfit.report.schema.encoding import encode


class ExplanationJson(DryRunJson, frozen=True):
    """What ``memfit explain --json`` writes."""

    below_peak: tuple[MemoryPeak, ...]
    """The moments that would limit the run next, highest first; none close to the peak or to another one."""
    at: str
    """The moment requested: ``peak``, a phase, or a training step."""
    held: Breakdown
    ledger: tuple[PhaseChange, ...]
    fragmentation: Fragmentation | None
    """With ``--fragmentation``; otherwise null."""


def public_explanation(explanation: Explanation) -> ExplanationJson:
    """Return the public part of an explanation."""
    return ExplanationJson(
        **msgspec.structs.asdict(public_dry_run(explanation.summary)),
        below_peak=explanation.below_peak,
        at=explanation.at,
        held=explanation.held,
        ledger=explanation.ledger,
        fragmentation=explanation.fragmentation,
    )


def to_json(explanation: Explanation) -> bytes:
    """Encode an explanation as one line of ASCII."""
    return encode(public_explanation(explanation))
