"""The public JSON of ``memfit verify``; docs/verify.schema.json is generated from it."""

import math

import msgspec

from memfit.records import (
    CountedOperations,
    Equality,
    GradientDifference,
    MeasuredPeak,
    Verification,
    VerificationVerdict,
)
from memfit.report.schema.encoding import SCHEMA_VERSION, encode


class GradientDifferenceJson(msgspec.Struct, frozen=True):
    """By how much the gradients of two runs differ."""

    parameters: int
    equal: int
    """Parameters whose gradients are equal bit for bit."""
    largest: float | None
    """The largest difference, relative to the largest gradient of the same parameter; null if a gradient is
    missing or not finite."""
    parameter: str
    """The parameter with that; empty if all are equal."""


class VerificationJson(msgspec.Struct, frozen=True):
    """What ``memfit verify --json`` writes."""

    schema: int
    verdict: VerificationVerdict
    reason: str
    """Why the runs are not comparable, or which operations are not the planned ones; otherwise empty."""
    equality: Equality
    """What the plan promises."""
    bound: float | None
    """The largest difference that the plan may make: 0 for every bit, null for any."""
    planned: GradientDifferenceJson
    """The script under the plan, compared with the script as written."""
    repeated: GradientDifferenceJson | None
    """The script as written, run twice; null if it ran once, because the plan keeps its promise."""
    dropout: bool
    """Whether the script's dropout was on: off if a plan divides batches, whose parts draw other numbers."""
    arithmetic: str
    """The lowest precision of the forward."""
    device: str
    """What the script ran on: ``CPU``, or the GPU's name."""
    peaks: tuple[int, int] | None
    """Bytes allocated at most until the update, as written and under the plan, as measured; null on a CPU."""
    measured: MeasuredPeak | None
    """The peak of three steps under the plan on a GPU; null on a CPU, or if the plan is not verified."""
    operations: CountedOperations | None
    """Operations of the first update; null if they were not counted."""
    command: tuple[str, ...]
    planned_for: tuple[str, ...]
    """The command that the plan was made for."""
    versions: dict[str, str]


def to_json(result: Verification) -> bytes:
    """Encode a verification as one line of ASCII."""
    return encode(
        VerificationJson(
            schema=SCHEMA_VERSION,
            verdict=result.verdict,
            reason=result.reason,
            equality=result.equality,
            bound=_finite(result.bound),
            planned=_difference(result.planned),
            repeated=None if result.repeated is None else _difference(result.repeated),
            dropout=result.dropout,
            arithmetic=result.arithmetic,
            device=result.device,
            peaks=result.peaks,
            measured=result.measured,
            operations=result.operations,
            command=result.command,
            planned_for=result.planned_for,
            versions=dict(result.versions),
        )
    )


def _difference(found: GradientDifference) -> GradientDifferenceJson:
    return GradientDifferenceJson(found.parameters, found.equal, _finite(found.largest), found.parameter)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
