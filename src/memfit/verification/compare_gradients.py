"""Compare the gradients that runs of a script have written, and judge a plan by them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from memfit.records import Equality, GradientDifference, VerificationVerdict
from memfit.verification.first_update import FirstUpdate, SavedGradient

BOUNDS = {"float64": 1e-12, "float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}
"""By the precision of the forward: the largest difference that sums in another order may make, relative to
the largest gradient of the parameter. About a hundred times the rounding of one operation in float32, and ten
times in float16 and bfloat16."""
_NOT_TWICE = (
    "The script as written does not compute the same gradients twice. Try "
    "torch.use_deterministic_algorithms(True), and seed its random numbers."
)
_SMALL = 1e-3
"""Of the largest gradient of the model: a parameter whose gradients are all smaller is compared with that.
Sums that cancel out, such as those of a key's bias in an attention, are nothing but rounding."""


@dataclass(frozen=True, slots=True)
class UpdateRun:
    """A run, and the folder with its gradients."""

    folder: Path
    update: FirstUpdate


def difference(one: UpdateRun, other: UpdateRun, *, parts: int = 1) -> GradientDifference:
    """Return by how much the gradients of another run differ.

    Args:
        one: the run to compare with.
        other: the other run.
        parts: micro-batches whose gradients the other run has summed, without dividing the loss by them.
    """
    found = {each.name: number for number, each in enumerate(other.update.gradients)}
    largest = max((np.abs(values).max(initial=0.0) for _, values in _gradients(one)), default=0.0)
    equal, worst, where = 0, 0.0, ""
    for gradient, values in _gradients(one):
        number = found.get(gradient.name)
        if number is None or other.update.gradients[number].shape != gradient.shape:
            worst, where = float("inf"), gradient.name
            continue
        others = _values(other, number) / parts
        if np.array_equal(values, others):
            equal += 1
            continue
        scale = max(float(np.abs(values).max()), _SMALL * float(largest))
        apart = float(np.abs(values - others).max()) / scale if scale else float("inf")
        apart = apart if np.isfinite(apart) else float("inf")
        if apart > worst:
            worst, where = apart, gradient.name
    for name in found.keys() - {gradient.name for gradient in one.update.gradients}:
        worst, where = float("inf"), name
    return GradientDifference(len(one.update.gradients), equal, worst, where)


def judge(
    plain: UpdateRun,
    again: UpdateRun,
    planned: UpdateRun,
    equality: Equality,
    differences: tuple[GradientDifference, GradientDifference],
) -> tuple[VerificationVerdict, str, float]:
    """Return whether a plan keeps its promise, why not, and the difference that it may make.

    Args:
        plain: the script as written.
        again: the same once more.
        planned: the script under the plan.
        equality: what the plan promises.
        differences: of ``planned`` and of ``again``, from ``plain``.
    """
    differs, repeats = differences
    if equality is Equality.OTHER:
        bound = float("inf")
    elif equality is Equality.BITWISE:
        bound = 0.0
    else:
        bound = BOUNDS.get(plain.update.arithmetic, BOUNDS["bfloat16"])
    if why := _why_not_comparable(plain, again, planned):
        return VerificationVerdict.NOT_COMPARABLE, why, bound
    if differs.largest <= bound:
        return VerificationVerdict.VERIFIED, "", bound
    if repeats.largest > bound:
        return VerificationVerdict.NOT_COMPARABLE, _NOT_TWICE, bound
    return VerificationVerdict.DIFFERS, "", bound


def _why_not_comparable(plain: UpdateRun, again: UpdateRun, planned: UpdateRun) -> str:
    if not plain.update.gradients:
        return "No parameter has a gradient when the optimizer makes its first update."
    if plain.update.rows != again.update.rows:
        return "The script gives its model other inputs each time it runs. Seed its random numbers."
    if plain.update.rows != planned.update.rows:
        return (
            "Under the plan, the script gives its model other inputs, because it draws smaller batches in "
            "another way. Read the data with a DataLoader and a seed, or compare with memfit.Engine."
        )
    return ""


def _gradients(run: UpdateRun) -> Iterator[tuple[SavedGradient, npt.NDArray[np.float64]]]:
    for number, gradient in enumerate(run.update.gradients):
        yield gradient, _values(run, number)


def _values(run: UpdateRun, number: int) -> npt.NDArray[np.float64]:
    content = np.load(run.folder / f"{number}.npy", allow_pickle=False)
    dtype = run.update.gradients[number].dtype
    if dtype == "bfloat16":  # the upper half of a float32
        values = (content.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = content.view(np.dtype(dtype))
    return np.asarray(values, np.float64)
