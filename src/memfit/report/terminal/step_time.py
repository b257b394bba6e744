"""The time of a training step in a summary: how long it takes, how sure that is, and what takes it."""

from collections.abc import Iterator

from memfit.records import CommunicationTime, StepTime
from memfit.report.escape_control_characters import escaped
from memfit.units import format_seconds

_SHOWN = 4
"""Kinds of kernels that are named."""
_SEEN = 0.005
"""The share of a step that is more than 0 %."""
_BACKWARD = "_backward"
_SPOKEN_WITH_VOWEL = "AEFHILMNORSX"
"""Letters whose names begin with a vowel: an H100, a T4."""
KINDS = {
    "product": "matrix products",
    "convolution": "convolutions",
    "depthwise": "convolutions",
    "pointwise": "elementwise",
    "efficient": "attention",
    "flash": "attention",
    "cudnn": "attention",
    "flex": "attention",
    "scatter": "indexing",
    "gather": "indexing",
    "transpose": "copies",
    "copy": "copies",
    "fused": "compiled kernels",
    **dict.fromkeys(("all_reduce", "all_gather", "all_to_all"), "collectives"),
}
"""What kinds of kernels are called, backward included, where their names do not say it."""


def step_time_lines(time: StepTime | None, unknown: str = "", step: str = "A step") -> Iterator[str]:
    """Yield how long a step takes and what takes it, or why that is not known.

    Args:
        time: of the step.
        unknown: why there is none, as a clause.
        step: which one, as the beginning of a sentence.
    """
    if unknown:
        yield f"No time of a step: {escaped(unknown)}."
    if time is None:
        return
    between = f"{format_seconds(time.low)} to {format_seconds(time.high)}"
    about = f"about {format_seconds(time.seconds)} ({between})"
    article = "an" if time.card[:1] in _SPOKEN_WITH_VOWEL else "a"
    yield f"{step} takes {about} on {article} {escaped(time.card)}{_rate(time)}."
    if time.is_bound_by_host:
        busy = time.gpu_seconds / time.seconds
        yield f"  The host limits it: the GPU is busy for {busy:.0%} of the time ({time.host_basis})."
    if time.cpu_seconds >= _SEEN * time.seconds:
        yield f"  Operations on the CPU take {format_seconds(time.cpu_seconds)} of it ({time.host_basis})."
    if time.communication is not None:
        yield f"  {_communication(time, time.communication)}"
    parts = [f"{name} {share:.0%}" for name, share in shares_by_name(time)[:_SHOWN] if share >= _SEEN]
    yield f"  Of the GPU's time: {', '.join(parts)}. {time.basis[:1].upper()}{time.basis[1:]}."


def name_of_kind(kind: str) -> str:
    """Return what a kind of kernels is called.

    >>> name_of_kind("flash_backward"), name_of_kind("layer_norm")
    ('attention', 'layer norm')
    """
    plain = kind.removesuffix(_BACKWARD)
    return KINDS.get(plain, plain.replace("_", " "))


def shares_by_name(time: StepTime) -> list[tuple[str, float]]:
    """Return the shares of the GPU's time by kind, under the names that users know; largest first."""
    total = sum(each.seconds for each in time.kinds)
    sums: dict[str, float] = {}
    for kind in time.kinds:
        name = name_of_kind(kind.name)
        sums[name] = sums.get(name, 0.0) + kind.seconds / total
    return sorted(sums.items(), key=lambda each: -each[1])


def _communication(time: StepTime, shared: CommunicationTime) -> str:
    alone, exposed = format_seconds(shared.seconds), shared.exposed / time.seconds
    where = (
        f"without them, the step would be {exposed:.0%} shorter"
        if exposed >= _SEEN
        else "other work hides them"
    )
    sure = f"{shared.basis[:1].upper()}{shared.basis[1:]}"
    return f"Collectives of {shared.ranks} ranks take {alone}: {where}. {sure}."


def _rate(time: StepTime) -> str:
    rates = {"tokens": time.tokens_per_second, "samples": time.samples_per_second}
    of_rank = " a rank" if time.communication else ""
    return next((f": {rate:,.0f} {what}/s{of_rank}" for what, rate in rates.items() if rate), "")
