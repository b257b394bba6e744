"""Judge a plan by the first update of runs: by the gradients that these have written, and by operations."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfit.injection.injection_files import InjectionReport
from memfit.planning.sample_independence import count_elements, find_undivided_tensor
from memfit.records import CountedOperations, Equality, GradientComparison, InputTensor
from memfit.trials.trial_run import recomputed_saved_ops_in_words
from memfit.verification.first_update_process import FirstUpdate

BOUNDS = {"float64": 1e-12, "float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 5e-2}
"""By the precision of the forward: the largest difference that sums in another order may make, relative to
the largest gradient of the parameter. About a thousand times the rounding of one operation in float32, and
ten times in float16 and bfloat16. TF32 multiplies with the bits of float16.

A convolution's gradient sums over all places of all images: ResNet-18 with GroupNorm on 32 images of
112 x 112 in two slices differs by 6.4e-6 in float32, and by 1.7e-14 in float64; on 48 images of 224 x 224, by
more than 1e-5 in float32.
"""
_SMALL = 1e-3
"""Of the largest gradient of the model: a parameter whose gradients are all smaller is compared with that.
Sums that cancel out, such as those of a key's bias in an attention, are nothing but rounding."""


@dataclass(frozen=True, slots=True)
class FirstUpdateRun:
    """A run, and the folder with its gradients."""

    folder: Path
    update: FirstUpdate
    report: InjectionReport = InjectionReport()  # noqa: RUF009 - frozen
    """What became of the change, and what the update ran."""


def gradient_difference(one: FirstUpdateRun, other: FirstUpdateRun, *, parts: int = 1) -> GradientComparison:
    """Return by how much the gradients of another run differ.

    Args:
        one: the run to compare with.
        other: the other run.
        parts: micro-batches whose gradients the other run has summed, without dividing the loss by them.
    """
    found = {each.name: number for number, each in enumerate(other.update.gradients)}
    largest = max((_most(_values(one, number)) for number in range(len(one.update.gradients))), default=0.0)
    equal, worst, where = 0, 0.0, ""
    for number, gradient in enumerate(one.update.gradients):
        same = found.pop(gradient.name, None)
        apart = float("inf")
        if same is not None and other.update.gradients[same] == gradient:
            apart = _apart(one, number, other, same, parts, _SMALL * largest)
        equal += not apart
        if apart > worst:
            worst, where = apart, gradient.name
    if found:
        worst, where = float("inf"), next(iter(found))
    return GradientComparison(len(one.update.gradients), equal, worst, where)


def _apart(
    one: FirstUpdateRun, number: int, other: FirstUpdateRun, same: int, parts: int, least: float
) -> float:
    """Return by how much a gradient differs in two runs, relative to its largest value, or to ``least``.

    Infinite if a value is not finite, unless all bits are equal.
    """
    if parts == 1 and np.array_equal(_content(one, number), _content(other, same)):
        return 0.0
    values, others = _values(one, number), _values(other, same) / parts
    if np.array_equal(values, others):
        return 0.0
    apart = _most(values - others) / max(_most(values), least)
    return apart if np.isfinite(apart) else float("inf")


def _most(values: npt.NDArray[np.float64]) -> float:
    return float(np.abs(values).max(initial=0.0))


def largest_allowed_difference(equality: Equality, arithmetic: str) -> float:
    """Return the largest difference that a plan may make."""
    if equality is Equality.OTHER:
        return float("inf")
    return 0.0 if equality is Equality.BITWISE else BOUNDS.get(arithmetic, BOUNDS["bfloat16"])


def gradients_keep_promise(
    plain: FirstUpdateRun, planned: FirstUpdateRun, apart: GradientComparison, bound: float, *, parts: int = 1
) -> bool:
    """Return whether two runs with the same inputs have gradients that differ by no more than a bound.

    Gradients that are missing or not finite are never within it.
    """
    within = apart.largest <= bound and np.isfinite(apart.largest)
    return bool(plain.update.gradients) and have_same_inputs(plain, planned, parts) and bool(within)


def have_same_inputs(one: FirstUpdateRun, other: FirstUpdateRun, parts: int = 1) -> bool:
    """Return whether two runs passed their models the same rows, in the same order."""
    mine, others = one.update.inputs, other.update.inputs
    return not mine if not others else not isinstance(find_undivided_tensor(mine, others, parts), InputTensor)


def why_runs_not_comparable(
    plain: FirstUpdateRun,
    again: FirstUpdateRun,
    planned: FirstUpdateRun,
    repeats: GradientComparison,
    bound: float,
    *,
    parts: int = 1,
) -> str:
    """Return why runs do not tell whether a plan keeps its promise; empty if they do.

    Args:
        plain: the script as written.
        again: the same once more.
        planned: the script under the plan.
        repeats: by how much ``again`` differs.
        bound: the largest difference that the plan may make.
        parts: micro-batches of a batch under the plan.
    """
    if not plain.update.gradients:
        return "No parameter has a gradient when the optimizer makes its first update."
    if not have_same_inputs(plain, again):
        return (
            "The script gives its model other inputs each time it runs, although memfit seeds Python's, "
            "NumPy's and PyTorch's global generators. Seed what draws them."
        )
    if not have_same_inputs(plain, planned, parts):
        before, after = count_elements(plain.update.inputs), count_elements(planned.update.inputs)
        if before != after:
            padded = "the script pads smaller batches to another length, or " * (parts > 1)
            return (
                f"Under the plan, an update sees {after:,} numbers of input instead of {before:,}: {padded}"
                "the plan is for batches of another size, and the script is to be run with those."
            )
        return (
            "Under the plan, the script gives its model other inputs: it draws smaller batches in another "
            "way, or cuts its data by the batch size."
        )
    if repeats.largest > bound:
        return (
            "The script as written does not compute the same gradients twice. Try "
            "torch.use_deterministic_algorithms(True), and seed its random numbers."
        )
    return ""


def _content(run: FirstUpdateRun, number: int) -> npt.NDArray[np.uint8]:
    content: npt.NDArray[np.uint8] = np.load(run.folder / f"{number}.npy", allow_pickle=False)
    return content


def _values(run: FirstUpdateRun, number: int) -> npt.NDArray[np.float64]:
    content, dtype = _content(run, number), run.update.gradients[number].dtype
    if dtype == "bfloat16":  # the upper half of a float32
        return (content.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return content.view(np.dtype(dtype)).astype(np.float64)


def why_other_operations(
    operations: CountedOperations | None,
    again: Mapping[str, int],
    *,
    is_same: bool,
    is_checkpointing: bool,
) -> str:
    """Return why an update did not run the operations that were planned, as a sentence; empty if it did.

    Args:
        operations: as counted.
        again: by operation, how often its results were kept, and it was recomputed all the same.
        is_same: whether the plan was made for this command, and it ran on a GPU.
        is_checkpointing: whether the plan changes nothing but what is recomputed.

    >>> from memfit.records import OperationCounts
    >>> found = CountedOperations(OperationCounts(168, 60), None, OperationCounts(168, 24))
    >>> why_other_operations(found, {}, is_same=True, is_checkpointing=True)
    'The update recomputes 60 of 168 operations, the plan 24 of 168 operations.'
    """
    if again:
        why = recomputed_saved_ops_in_words(again)
        return f"{why[0].upper()}{why[1:]}."
    if operations is None:
        return ""
    found, planned, plain = operations.under_plan, operations.planned, operations.as_written
    if planned is not None and is_same and not found.recomputes_as(planned):
        return f"The update recomputes {found}, the plan {planned}."
    if is_checkpointing and plain is not None and found.backward != plain.backward:
        return (
            f"Besides what is recomputed, the backward runs {found.backward} operations, and as written "
            f"{plain.backward}."
        )
    return ""
