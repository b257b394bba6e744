"""Whether the micro-batches of a script have the samples of the batches that they divide.

    whole batches    a b c d │ e f g h      copied to the GPU, or parts of what was copied before
    in two parts     a b│c d │ e f│g h      the same rows along one dimension, in the same order

A script's batch size may be something else than a number of samples: some language models cut their corpus by
it, so that smaller batches have other rows.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

from memfit.records import Change, FedSamples, FedTensor, StepOperations

_MOST_ALIKE = 8
"""Tensors of one shape in a batch, such as the inputs and the targets of a language model."""
_COMPUTED = (
    "if micro-batches have the samples of the whole batch. memfit does not see them, because the GPU makes "
    "what the model is passed"
)
_ONE_STEP = (
    "if only parameters and the state of the optimizer go from one step to the next. memfit does not see "
    "that, because it recorded one step"
)
_OTHER_CONTENTS = (
    "if a sample has nothing of the others in its batch. Micro-batches have the samples of the whole batch, "
    "but with other contents: augmented at random, padded to another length, or mixed with each other"
)


@dataclass(frozen=True, slots=True)
class SampleComparison:
    """What two runs of a script show, one with whole batches and one with parts."""

    why: str = ""
    """Why the samples are others, as a clause; empty if they are not."""
    assumed: str = ""
    """What memfit has not seen and assumes, as in ``DividedBatches``."""


def samples_of_parts(whole: StepOperations, parts: StepOperations, count: int) -> SampleComparison:
    """Compare what a script fed its model, as ``compare_samples`` does; what one step shows is assumed."""
    found = compare_samples(whole.samples or FedSamples(), parts.samples or FedSamples(), count)
    is_one = whole.carried is None and not whole.compiled and not found.why and not found.assumed
    return replace(found, assumed=_ONE_STEP) if is_one else found


def with_samples(plan: Change, samples: SampleComparison) -> Change:
    """Return a plan that divides batches, with what two runs have shown of their samples."""
    if plan.micro_batches is None:
        return plan
    return replace(plan, micro_batches=replace(plan.micro_batches, assumed=samples.assumed))


def compare_samples(whole: FedSamples, parts: FedSamples, count: int) -> SampleComparison:
    """Compare what a script fed its model with whole batches, and in parts.

    Args:
        whole: with whole batches.
        parts: with batches in parts.
        count: of the parts of a batch.
    """
    passes = list(zip(whole.drawn, parts.drawn, strict=False))
    if not all(_draw_the_same(*each) for each in passes):
        return SampleComparison("with smaller batches, its DataLoader draws other samples")
    compared = [
        other_rows(*some, count) for some in ((whole.copied, parts.copied), (whole.passed, parts.passed))
    ]
    other = next((found for found in compared if isinstance(found, FedTensor)), None)
    if other is None:
        seen = (passes or True in compared) and not (whole.computed or parts.computed)
        return SampleComparison(assumed="" if seen else _COMPUTED)
    if passes and all(len(one[0]) == count * len(smaller[0]) for one, smaller in passes):
        return SampleComparison(assumed=_OTHER_CONTENTS)
    return SampleComparison(
        "the parts of a batch have other rows than the whole batch: the script makes them in another way if "
        f"its batch size is smaller (seen in {described(other)})"
    )


def other_rows(whole: Sequence[FedTensor], parts: Sequence[FedTensor], count: int) -> FedTensor | bool:
    """Return the first whole tensor that parts do not divide; else whether any tensor was divided.

    Args:
        whole: of batches.
        parts: of their parts, in the same order.
        count: of the parts of a batch.
    """
    divided = False
    by_shape, others = _by_shape(whole), _by_shape(parts)
    for (dtype, shape), tensors in by_shape.items():
        found = [
            (dimension, others[dtype, smaller])
            for dimension, smaller in _smaller(shape, count)
            if (dtype, smaller) in others
        ]
        if any(_divides(tensors, some, dimension, count) for dimension, some in found):
            divided = True
        else:
            same = others.get((dtype, shape), [])
            if not same or any(one != other for one, other in zip(tensors, same, strict=False)):
                return tensors[0]
    return divided


def described(tensor: FedTensor) -> str:
    """Return a tensor's dtype and shape, for the user.

    >>> described(FedTensor("int64", (35, 20), ()))
    'int64, 35 x 20'
    """
    return f"{tensor.dtype}, {' x '.join(f'{size:,}' for size in tensor.shape)}"


def elements(tensors: Sequence[FedTensor]) -> int:
    """Return how many numbers some tensors have."""
    return sum(prod(each.shape) for each in tensors)


def _draw_the_same(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> bool:
    """Return whether two passes over a loader draw the same samples in the same order, as far as both go."""
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=False)
    return all(mine == others for mine, others in pairs)


def _by_shape(tensors: Sequence[FedTensor]) -> dict[tuple[str, tuple[int, ...]], list[FedTensor]]:
    found: dict[tuple[str, tuple[int, ...]], list[FedTensor]] = defaultdict(list)
    for each in tensors:
        found[each.dtype, each.shape].append(each)
    return dict(found)


def _smaller(shape: tuple[int, ...], count: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    for dimension, size in enumerate(shape[:2]):
        if size % count == 0:
            yield dimension, (*shape[:dimension], size // count, *shape[dimension + 1 :])


def _divides(whole: Sequence[FedTensor], parts: Sequence[FedTensor], dimension: int, count: int) -> bool:
    """Return whether the rows of parts are those of whole tensors, of which a batch has one or more."""
    return any(
        _divides_by(whole, parts, dimension, count, alike)
        for alike in range(1, min(len(whole), _MOST_ALIKE) + 1)
    )


def _divides_by(
    whole: Sequence[FedTensor], parts: Sequence[FedTensor], dimension: int, count: int, alike: int
) -> bool:
    batches = min(len(whole), len(parts) // count) // alike
    return batches > 0 and all(
        whole[batch * alike + which].rows[dimension]
        == tuple(
            row
            for part in range(count)
            for row in parts[(batch * count + part) * alike + which].rows[dimension]
        )
        for batch in range(batches)
        for which in range(alike)
    )
