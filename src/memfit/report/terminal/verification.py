"""A plan's first update, on the terminal: whether its gradients are those that the plan promises."""

import shlex
from collections.abc import Iterator

from rich.console import Console

from memfit.records import (
    CountedOperations,
    Equality,
    GradientComparison,
    MeasuredPeak,
    Provenance,
    Verification,
    VerificationVerdict,
)
from memfit.report.escape_control_characters import escaped
from memfit.report.terminal.layout import print_answer_and_subject, subject_in_words
from memfit.units import format_gib

_VERDICTS = {
    VerificationVerdict.VERIFIED: "VERIFIED",
    VerificationVerdict.DIFFERS: "DIFFERS",
    VerificationVerdict.NOT_COMPARABLE: "NOT COMPARABLE",
    VerificationVerdict.OTHER_OPERATIONS: "NOT VERIFIED",
}


def print_verification(result: Verification, console: Console) -> None:
    """Print whether a plan's gradients are those that it promises."""
    verdict = f"{_VERDICTS[result.verdict]}   {_finding(result)}"
    print_answer_and_subject(
        verdict, console, subject_in_words(result.command, result.device, versions=result.versions)
    )
    for line in _details(result):
        console.print(line)


def _finding(result: Verification) -> str:
    planned = result.planned
    if result.reason:
        return escaped(result.reason)
    if planned.equal == planned.parameters:
        return f"the gradients of all {planned.parameters} parameters are equal bit for bit"
    if result.verdict is VerificationVerdict.DIFFERS and planned.largest == float("inf"):
        return "under the plan, a gradient is missing, or not finite"
    if result.verdict is VerificationVerdict.DIFFERS:
        promise = "bit for bit" if result.equality is Equality.BITWISE else "up to rounding"
        return f"the gradients are not equal {promise}, as the plan promises"
    if result.equality is Equality.OTHER:
        return "the gradients have other numerics, as the plan allows"
    return f"the gradients of all {planned.parameters} parameters are equal up to rounding"


def _apart(difference: GradientComparison) -> str:
    where = escaped(difference.parameter)
    if difference.largest == float("inf"):
        return f"{where} has no such gradient, or none that is finite"
    return f"at most {difference.largest:.1e} of the largest gradient, in {where}"


def _measured(peak: MeasuredPeak) -> Iterator[str]:
    process = peak.process
    machine = "rehearsed" if process.provenance is Provenance.ASSUMED else "measured"
    yield (
        f"Peak of three steps under the plan: {peak.allocated:,} bytes allocated, {peak.reserved:,} reserved "
        f"({machine}), {format_gib(process.bytes)} of the process ({process.provenance})."
    )
    if peak.predicted is not None:
        more = peak.allocated - peak.predicted
        yield (
            f"The plan predicts {peak.predicted:,} bytes allocated (exact on the ghost): "
            + (f"{more:+,} measured." if more else "the same.")
        )


def _operations(found: CountedOperations, *, on_cpu: bool) -> Iterator[str]:
    ran, planned, plain = found.under_plan, found.planned, found.as_written
    if planned is None or ran.recomputes_as(planned):
        yield f"Recomputed {ran}{'' if planned is None else ', as planned'}."
    else:
        yield f"Recomputed {ran}{' on the CPU, with other kernels' * on_cpu}; the plan recomputes {planned}."
    if plain is not None and plain.forward == ran.forward:  # not in micro-batches
        same = "as many" if ran.backward == plain.backward else plain.backward
        yield f"The backward ran {ran.backward} others, as written {same}."


def _details(result: Verification) -> Iterator[str]:
    yield from _gradients(result)
    if result.operations is not None:
        yield from _operations(result.operations, on_cpu=result.device == "CPU")
    yield from _peaks(result)
    if not result.dropout:
        yield "Dropout was off: parts of a batch draw other numbers than the whole batch."
    if result.planned_for and result.planned_for != result.command:
        yield f"The plan was made for: {escaped(shlex.join(result.planned_for))}"


def _gradients(result: Verification) -> Iterator[str]:
    if result.planned.equal < result.planned.parameters:
        yield f"Difference under the plan: {_apart(result.planned)}."
    if result.equality is Equality.ROUNDING:
        yield (
            f"Sums in another order may differ by {result.bound:.0e} in {escaped(result.arithmetic)}, the "
            "lowest precision of the forward."
        )
    if result.repeated is not None and result.repeated.equal == result.repeated.parameters:
        yield "As written, two runs give the same gradients bit for bit."
    elif result.repeated is not None:
        yield f"Difference of two runs as written: {_apart(result.repeated)}."


def _peaks(result: Verification) -> Iterator[str]:
    if result.peaks is None and result.measured is None:
        yield "Peaks of GPU memory are not measured on a CPU; memfit dry-run --plan shows them."
    elif result.peaks is not None:
        before, after = map(format_gib, result.peaks)
        yield f"Allocated at most until the update: {after} instead of {before} (measured)."
    if result.measured is not None:
        yield from _measured(result.measured)
