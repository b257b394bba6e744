"""Whether micro-batches give the same sums as batches, in another order.

A step must compute each sample by itself:

    inputs ──> results of samples ──> sums or means over samples ──> loss
               twice as large         as large as before             only scaled, and added to others
               with twice the samples

The step is seen twice, the second time with half the samples. Batch normalization takes statistics of the
batch, a contrastive loss compares each sample with each other, and a ratio of two sums is no sum: there,
samples depend on each other.

Micro-batches must have the samples of the batches that they divide:

    whole batches    a b c d │ e f g h      copied to the GPU, or parts of what was copied before
    in two parts     a b│c d │ e f│g h      the same rows along one dimension, in the same order

Some language models cut their corpus by the batch size, so that smaller batches have other rows.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain
from math import prod

from memfit.records import InputTensor, Operation, StepInputs, StepOperations

_HALF = 2
_SUMS = (
    "aten.sum",
    "aten.mean",
    "aten.nll_loss",
    "aten.mse_loss",
    "aten.l1_loss",
    "aten.smooth_l1_loss",
    "aten.huber_loss",
    "aten.binary_cross_entropy",
    "aten.soft_margin_loss",
    "aten.dot",
)
"""Operations that may reduce samples to their sum or mean."""
_LINEAR = (
    "aten.add",
    "aten.sub",
    "aten.rsub",
    "aten.mul",
    "aten.div",
    "aten.neg",
    "aten.sum",
    "aten.mean",
    "aten.stack",
    "aten.cat",
    "aten.clone",
    "aten.copy",
    "aten._to_copy",
)
"""Operations through which a sum stays one, if all else that they read is constant."""
_PRODUCTS, _QUOTIENT = ("aten.mul", "aten.div"), "aten.div"
_WITH_CONSTANTS = (
    "aten._cudnn_rnn",
    "aten._scaled_dot_product",
    "aten._flash_attention",
    "aten._efficient_attention",
)
"""Operations that also return a copy of their weights, or the seed of a random draw."""


class _Kind(Enum):
    CONSTANT = 0
    """The same whatever the samples are."""
    SAMPLES = 1
    """Each part belongs to a sample."""
    SUM = 2
    """Sums or means over the samples."""
    COUNT = 3
    """How many samples, or tokens of samples, count: assumed to be alike in each micro-batch."""


def why_samples_depend(whole: StepOperations, half: StepOperations, *, in_model: bool = False) -> str:
    """Return why samples depend on each other in a step, as a clause; empty if each is computed by itself.

    That is seen by the sizes of results. A step that exchanges samples within the batch, as mixup does,
    passes. So does a mean over the tokens that count: it is the mean of those of the micro-batches if as many
    count in each.

    Args:
        whole: the step.
        half: the same step with half the samples.
        in_model: whether only what the model's calls compute counts: a loss outside it may combine samples,
            and what the script passes to the model may be what the step before made of the same samples.
    """
    differentiated = _differentiated(whole)
    end = max(differentiated, default=-1) + 1  # what runs after the backward is in forward, too
    if [each.name for each in whole.forward[:end]] != [each.name for each in half.forward[:end]]:
        return "with half the samples, the step runs other operations"
    kinds: dict[int, _Kind] = {}
    carried = _learned_from(whole).intersection(whole.carried or ())
    for call in whole.calls:
        if call.parent < 0:
            carried -= {*call.reads} if in_model else set()
            kinds |= dict.fromkeys(call.reads, _Kind.SAMPLES) | dict.fromkeys(call.counts, _Kind.COUNT)
    for number, (operation, smaller) in enumerate(zip(whole.forward[:end], half.forward[:end], strict=True)):
        _learn_kinds(kinds, operation, smaller, whole, half)
        counts = operation.call >= 0 or not in_model
        if counts and operation.mixed != smaller.mixed:
            return f"{_place(operation, whole)}, samples are combined with each other"
        if carried.intersection(operation.reads):
            return f"{_place(operation, whole)}, a step goes on from what the one before made of its samples"
        created = [whole.storages[storage] for storage in operation.creates]
        sizes = zip(created, _created(smaller, half), strict=False)
        growth = [1 if operation.single and smaller.single else _growth(*each) for each in sizes]
        found, fault = _results(operation, [kinds[storage] for storage in operation.reads], growth, created)
        if counts and fault and number in differentiated:
            return f"{_place(operation, whole)}, {fault}"
        if counts and _changes_a_constant(operation, kinds):
            return f"{_place(operation, whole)}, samples change what outlives the step"
        kinds |= dict(zip(operation.creates, found, strict=False))
        if _Kind.SUM in [kinds[storage] for storage in operation.reads]:
            kinds |= dict.fromkeys(operation.writes, _Kind.SUM)
    return ""


def _differentiated(step: StepOperations) -> set[int]:
    """Return which operations of the forward the backward goes through."""
    return {operation.source for operation in step.backward}


def _learned_from(step: StepOperations) -> set[int]:
    """Return the storages that decide what the backward computes: not those of figures beside the loss."""
    differentiated = _differentiated(step)
    found: set[int] = set()
    for number, operation in reversed([*enumerate(step.forward)]):
        if number in differentiated or not found.isdisjoint((*operation.creates, *operation.writes)):
            found.update(operation.reads)
    return found


def _learn_kinds(
    kinds: dict[int, _Kind],
    operation: Operation,
    smaller: Operation,
    whole: StepOperations,
    half: StepOperations,
) -> None:
    """Learn what storages hold that an operation reads and that existed before, or the backward created."""
    for storage, other in zip(operation.reads, smaller.reads, strict=False):
        if storage not in kinds:
            grows = _growth(whole.storages[storage], half.storages[other]) == _HALF
            kinds[storage] = _Kind.SAMPLES if grows else _Kind.CONSTANT


def why_loss_is_a_sum(whole: StepOperations, half: StepOperations | None = None) -> str:
    """Return why a loss is a sum over samples, not a mean, as a clause; empty if memfit sees no such sum.

    A sum that is divided by a tensor passes, as by the number of tokens; so does one that is divided by a
    number which grows with the samples. A factor, as that of a loss scaler, makes no mean.

    Args:
        whole: the step.
        half: the same step with half the samples; None for what ``whole`` shows by itself.
    """
    differentiated = _differentiated(whole)
    sums: dict[int, set[int]] = {}
    """By storage: which operations have summed up samples for it."""
    unscaled: set[int] = set()
    for number, (operation, smaller) in enumerate(zip(whole.forward, (half or whole).forward, strict=False)):
        if number not in differentiated:
            continue
        summed = set[int]().union(*(sums.get(storage, ()) for storage in operation.reads))
        if operation.sums or (half is not None and _sums_samples(operation, smaller, whole, half)):
            summed.add(number)
            unscaled.add(number)
        elif operation.name.startswith(_PRODUCTS) and (
            half is None
            or (operation.name.startswith(_QUOTIENT) and len(operation.reads) > 1)
            or smaller.factor == _HALF * operation.factor
        ):
            unscaled -= summed
        sums |= dict.fromkeys((*operation.creates, *operation.writes), summed)
    if not unscaled:
        return ""
    operation = whole.forward[min(unscaled)]
    how = ' (reduction="sum")' * operation.sums
    return f"{_place(operation, whole)}, the loss is a sum over samples{how}, and memfit divides it as a mean"


def _sums_samples(
    operation: Operation, smaller: Operation, whole: StepOperations, half: StepOperations
) -> bool:
    """Return whether a call of ``torch.sum`` sums up samples."""
    grows = any(
        _growth(whole.storages[storage], half.storages[other]) == _HALF
        for storage, other in zip(operation.reads, smaller.reads, strict=False)
    )
    made, other = (sum(_created(*each)) for each in ((operation, whole), (smaller, half)))
    return operation.name.startswith("aten.sum.") and grows and made == other


def _created(operation: Operation, step: StepOperations) -> list[int]:
    return [step.storages[storage] for storage in operation.creates]


def _growth(large: int, small: int) -> int | None:
    """Return 2 for twice the size with twice the samples, 1 for the same; None for anything else."""
    return 1 if large == small else _HALF if large == _HALF * small else None


def _changes_a_constant(operation: Operation, kinds: dict[int, _Kind]) -> bool:
    read, changed = ({kinds[each] for each in some} for some in (operation.reads, operation.writes))
    return _Kind.SAMPLES in read and _Kind.CONSTANT in changed


def _results(
    operation: Operation, read: Sequence[_Kind], growth: Sequence[int | None], created: Sequence[int]
) -> tuple[list[_Kind], str]:
    """Return what an operation creates, and why samples depend on each other in it."""
    name = operation.name.rsplit(".", 1)[0].removesuffix("_")
    kinds = [_Kind.CONSTANT if size == 1 else _Kind.SAMPLES for size in growth]
    if _Kind.SUM in read:
        return [_Kind.SUM] * len(kinds), _not_linear(name, read)
    if _Kind.SAMPLES not in read:
        counts = _Kind.COUNT in read
        return [_Kind.COUNT if counts and kind is _Kind.CONSTANT else kind for kind in kinds], ""
    if None in growth:
        return kinds, "results do not grow in proportion to the samples"
    if name.startswith(_SUMS):
        reduced = _Kind.COUNT if operation.dtype.startswith("int") else _Kind.SUM
        return [reduced if kind is _Kind.CONSTANT else kind for kind in kinds], ""
    combined = any(
        kind is _Kind.CONSTANT and size for kind, size in zip(kinds, created, strict=True)
    ) and not name.startswith(_WITH_CONSTANTS)
    return kinds, "samples are combined other than by a sum or a mean" * combined


def _not_linear(name: str, read: Sequence[_Kind]) -> str:
    """Return why an operation is not linear in a sum over samples; empty if it is."""
    if _Kind.SAMPLES in read:
        return "samples depend on a sum over all of them"
    product = name.startswith(_PRODUCTS) and read.count(_Kind.SUM) > 1
    inverse = name == _QUOTIENT and len(read) > 1 and read[-1] is _Kind.SUM
    if product or inverse or not name.startswith(_LINEAR):
        return "a sum over the samples is not only scaled and added to others"
    return ""


def _place(operation: Operation, step: StepOperations) -> str:
    if operation.call < 0:
        return f"in {operation.name} of the loss"
    call = step.calls[operation.call]
    return f"in {operation.name} of {call.module or 'the model'} ({call.kind})"


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

InputTensors = Sequence[InputTensor]


@dataclass(frozen=True, slots=True)
class SampleComparison:
    """What two runs of a script show, one with whole batches and one with parts."""

    why: str = ""
    """Why an update cannot sum the gradients of parts of a batch, as a clause."""
    in_model: str = ""
    """Why the model's call cannot divide its batch either, as a clause."""
    assumed: str = ""
    """What memfit has not seen and assumes, as in ``DividedBatches``."""


def compare_steps_of_parts(
    whole: StepOperations, parts: StepOperations, count: int, *, independent: bool = False
) -> SampleComparison:
    """Return whether an update can sum the gradients of parts of a batch instead of those of the batch.

    Args:
        whole: a step with whole batches.
        parts: one with batches in parts.
        count: of the parts of a batch.
        independent: whether other parts have shown that samples do not depend on each other.
    """
    found = compare_step_inputs(whole.samples or StepInputs(), parts.samples or StepInputs(), count)
    if found == SampleComparison() and whole.carried is None and not whole.compiled:
        found = SampleComparison(assumed=_ONE_STEP)
    if independent:
        return found
    depend = why_samples_depend(whole, parts)
    why = depend or why_loss_is_a_sum(whole, parts) or found.why
    return replace(found, why=why, in_model=depend and why_samples_depend(whole, parts, in_model=True))


def compare_step_inputs(whole: StepInputs, parts: StepInputs, count: int) -> SampleComparison:
    """Compare what a script fed its model with whole batches, and in ``count`` parts of each."""
    passes = list(zip(whole.drawn, parts.drawn, strict=False))
    if not all(_draw_the_same(*each) for each in passes):
        return SampleComparison("with smaller batches, its DataLoader draws other samples")
    compared = [
        find_undivided_tensor(*each, count)
        for each in ((whole.copied, parts.copied), (whole.passed, parts.passed))
    ]
    other = next((found for found in compared if isinstance(found, InputTensor)), None)
    if other is None:
        seen = (passes or True in compared) and not (whole.computed or parts.computed)
        return SampleComparison(assumed="" if seen else _COMPUTED)
    if passes and all(len(one[0]) == count * len(smaller[0]) for one, smaller in passes):
        return SampleComparison(assumed=_OTHER_CONTENTS)
    return SampleComparison(
        "with a smaller batch size, the script makes other rows: its smaller batches are not parts of the "
        f"batches as written (seen in {_dtype_and_shape(other)})"
    )


def find_undivided_tensor(whole: InputTensors, parts: InputTensors, count: int) -> InputTensor | bool:
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


def _dtype_and_shape(tensor: InputTensor) -> str:
    """Return a tensor's dtype and shape, for the user.

    >>> _dtype_and_shape(InputTensor("int64", (35, 20), ()))
    'int64, 35 x 20'
    """
    return f"{tensor.dtype}, {' x '.join(f'{size:,}' for size in tensor.shape)}"


def count_elements(tensors: InputTensors) -> int:
    """Return how many numbers some tensors have."""
    return sum(prod(each.shape) for each in tensors)


def _draw_the_same(one: Sequence[Sequence[str]], other: Sequence[Sequence[str]]) -> bool:
    """Return whether two passes over a loader draw the same samples in the same order, as far as both go."""
    pairs = zip(chain.from_iterable(one), chain.from_iterable(other), strict=False)
    return all(mine == others for mine, others in pairs)


def _by_shape(tensors: InputTensors) -> dict[tuple[str, tuple[int, ...]], list[InputTensor]]:
    found: dict[tuple[str, tuple[int, ...]], list[InputTensor]] = defaultdict(list)
    for each in tensors:
        found[each.dtype, each.shape].append(each)
    return dict(found)


def _smaller(shape: tuple[int, ...], count: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    for dimension, size in enumerate(shape[:2]):
        if size % count == 0:
            yield dimension, (*shape[:dimension], size // count, *shape[dimension + 1 :])


def _divides(whole: InputTensors, parts: InputTensors, dimension: int, count: int) -> bool:
    """Return whether the parts of each batch have its rows, whichever number of such tensors a batch has."""
    for alike in range(1, min(len(whole), _MOST_ALIKE) + 1):
        batches = min(len(whole), len(parts) // count) // alike
        if batches and all(
            whole[batch * alike + which].rows[dimension]
            == tuple(
                row
                for part in range(count)
                for row in parts[(batch * count + part) * alike + which].rows[dimension]
            )
            for batch in range(batches)
            for which in range(alike)
        ):
            return True
    return False
