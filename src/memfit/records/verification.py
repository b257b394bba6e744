"""A plan proven by real arithmetic: the gradients of one update, with the plan and without."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from memfit.records.printable_result import PrintableResult
from memfit.records.provenance import Figure
from memfit.records.script_change import Equality
from memfit.records.step_operations import OperationCounts


class VerificationVerdict(StrEnum):
    """Whether training under a plan computes what the plan promises."""

    VERIFIED = "verified"
    DIFFERS = "differs"
    """By more than the plan promises."""
    NOT_COMPARABLE = "not comparable"
    """The runs cannot tell."""
    OTHER_OPERATIONS = "other operations"
    """The gradients are those that the plan promises, but the update runs other operations than planned."""


@dataclass(frozen=True, slots=True)
class GradientComparison:
    """By how much the gradients of two runs differ."""

    parameters: int
    equal: int
    """Parameters whose gradients are equal bit for bit."""
    largest: float
    """The largest difference, relative to the largest gradient of the same parameter."""
    parameter: str
    """The parameter with that; empty if all are equal."""


@dataclass(frozen=True, slots=True)
class CountedOperations:
    """The operations of a script's first update, as the dispatcher saw them."""

    under_plan: OperationCounts
    as_written: OperationCounts | None
    """None if they were not counted: the script compiles its model, or calls its submodules."""
    planned: OperationCounts | None
    """On the ghost, with a GPU's kernels; None if the plan file does not say, or is of another PyTorch."""


@dataclass(frozen=True, slots=True)
class MeasuredPeak:
    """The peak of a script's first steps under a plan, on a GPU."""

    allocated: int
    reserved: int
    """Most bytes, as PyTorch's allocator counts them."""
    process: Figure
    """Most bytes of the process, the CUDA context included."""
    predicted: int | None
    """Most bytes allocated on the ghost; None if the plan file does not say, or is for another command."""


@dataclass(frozen=True, slots=True, repr=False)
class Verification(PrintableResult):
    """What a plan's first update shows."""

    json_description = "What ``memfit verify --json`` writes."

    verdict: VerificationVerdict
    reason: str
    """Why the runs are not comparable, or which operations are not the planned ones; otherwise empty."""
    equality: Equality
    """What the plan promises."""
    planned: GradientComparison
    """The script under the plan, compared with the script as written."""
    repeated: GradientComparison | None
    """The script as written, run twice; None if the plan keeps its promise, and it ran once."""
    bound: float
    """The largest difference that the plan may make; 0 if it promises every bit."""
    arithmetic: str
    """The lowest precision of the forward: ``float32``."""
    device: str
    """What the script ran on: ``CPU``, or the GPU's name."""
    peaks: tuple[int, int] | None
    """Bytes allocated at most until the update, as written and under the plan, as measured; None on a CPU."""
    measured: MeasuredPeak | None
    """Of training under the plan; None on a CPU, or if the plan is not verified."""
    operations: CountedOperations | None
    """None if those of the update under the plan were not counted, as where it changes no model."""
    command: tuple[str, ...]
    dropout: bool
    """Whether the script's dropout was on. Parts of a batch draw other numbers than the whole batch."""
    planned_for: tuple[str, ...]
    """The command that the plan was made for."""
    versions: Mapping[str, str]
