"""The value of an op's result from the known values of its inputs: one table of rules (``RULES``).

    comparisons   eq ne lt le gt ge                     of two known operands
    logic         & | ^ ~ and the logical_ forms        False & anything is False, True | anything is True
    extremes      max min amax amin                     the value itself
    reductions    all any sum                           all() of unknown values True, any() False: checked
    finiteness    isfinite isnan isinf                  True, False, False: finite
    membership    isin                                  False: checked (no token ends the text)
    selections    nonzero tensor[indices] cat           what the indices select (``KnownIndices``)
    grad scaler   _amp_*                                gradients are finite; the scale is exact

What is known of indices that a script has searched for bounds what a search among them finds. A detection
model samples some of its proposals, and searches the samples for those that show an object:

    negative = torch.where(labels == 0)[0]       indices of zeros in labels
    mask[negative[order]] = 1                    selects zeros
    sampled = torch.where(mask | positive)[0]    selects zeros, and as many others as positive selects
    labels[sampled] > 0                          true for these others at most

A rule reads the arguments before PyTorch's own kernel runs; its result is recorded once the kernel has made
all its allocations and autograd has incremented the versions of the tensors it wrote. The overrides
(``gpu_reads.py``) use autograd's dispatch key, because every write above that key increments the version: a
kernel that fills a buffer and then works on it calls below that key, where no override sees it.
"""

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit.dispatch_modes import without_dispatch_modes
from memfit.ghost.values.computed_on_cpu import run_on_cpu
from memfit.ghost.values.computed_ops import overload_of
from memfit.ghost.values.dtype_rounding import Number, round_to_dtype
from memfit.ghost.values.known_values import KnownValues
from memfit.ghost.values.tensor_facts import KnownIndices, KnownValue, KnownValueBasis, known_value_of_number


@dataclass(frozen=True, slots=True)
class KnownInputs:
    """The known values of an op's operands.

    ``all`` and ``any`` are the assumed results of these reductions over a whole tensor of unknown values.
    """

    known: KnownValues
    all: bool = True
    any: bool = False

    def of(self, operand: object) -> KnownValue | None:
        """Return the known value of a tensor or number, or None."""
        if isinstance(operand, torch.Tensor):
            return self.known.get(operand)
        return known_value_of_number(operand)

    def mostly(self, operand: object) -> KnownValue | None:
        """Return the value of a tensor's elements, some exceptions aside, or of a number; or None."""
        if isinstance(operand, torch.Tensor):
            return self.known.mostly(operand)
        return known_value_of_number(operand)


PropagationRule = Callable[..., KnownValue | KnownIndices | None]
"""``rule(inputs, *arguments, **keywords)`` returns what is known of the op's first result, or None."""


def _unchanged(inputs: KnownInputs, tensor: torch.Tensor, *_: object, **__: object) -> KnownValue | None:
    return inputs.of(tensor)


def _broadcast(known: KnownValue, operand: object, operands: Sequence[object]) -> KnownValue:
    """Return an operand's known value once broadcast to the shape of an elementwise result."""
    if not known.exceptions or not isinstance(operand, torch.Tensor):
        return known
    shapes = [other.shape for other in operands if isinstance(other, torch.Tensor)]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    if shape == operand.shape:
        return known
    repeats = math.prod(shape) // operand.numel()
    return known._replace(exceptions=known.exceptions * repeats, selection=None)


def _operands(inputs: KnownInputs, *operands: object) -> list[KnownValue | None]:
    """Return the known value of each operand of an elementwise op, broadcast to its result."""
    known = ((inputs.mostly(operand), operand) for operand in operands)
    return [fact and _broadcast(fact, operand, operands) for fact, operand in known]


def pointwise_value(
    op: Callable[..., Any], inputs: KnownInputs, *args: Any, **options: Any
) -> KnownValue | None:
    """Return the value of most elements of an elementwise result: the CPU computes one element."""
    tensors = [arg for arg in (*args, *options.values()) if isinstance(arg, torch.Tensor)]
    known = []
    for tensor in tensors:
        fact = inputs.mostly(tensor)
        if fact is None:
            return None
        known.append(_broadcast(fact, tensor, tensors))
    ones = iter(
        torch.full((1,) * tensor.dim(), fact.value, dtype=tensor.dtype, device="cpu")
        for tensor, fact in zip(tensors, known, strict=True)
    )
    with without_dispatch_modes():
        here = [next(ones) if isinstance(arg, torch.Tensor) else arg for arg in args]
        named = {name: next(ones) if isinstance(arg, torch.Tensor) else arg for name, arg in options.items()}
        result = run_on_cpu(op, here, named)
    if not result or result[0].is_complex():
        return None
    where = union_of_known_indices((fact.exceptions, fact.selection) for fact in known)
    exceptions = sum(fact.exceptions for fact in known)
    return KnownValue(result[0].item(), max(fact.basis for fact in known), exceptions, where)


def _compare(
    name: str, kind: str, inputs: KnownInputs, a: torch.Tensor, b: torch.Tensor | Number
) -> KnownValue | None:
    function = getattr(operator, name)
    if inputs.mostly(a) is None:
        if a.is_floating_point() and (a is b or (isinstance(b, float) and not math.isfinite(b))):
            # as a script looks for NaN or infinity
            return KnownValue(function(0.0, 0.0 if a is b else b), KnownValueBasis.FINITE)
        right = inputs.mostly(b)
        is_number = right is not None and not isinstance(b, torch.Tensor)
        return _where_equal(inputs.known, a, right.value) if right and is_number and name == "eq" else None
    return pointwise_value(overload_of(f"{name}.{kind}"), inputs, a, b)


def _where_equal(known: KnownValues, tensor: object, number: Number) -> KnownValue | None:
    """Return the result of ``tensor == number``: where it is true, an unknown vector holds the number."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1 or tensor.is_floating_point():
        return None
    source = known.state(tensor) if round_to_dtype(number, tensor.dtype) == number else None
    if source is None:
        return None
    return KnownValue(False, exceptions=tensor.numel(), selection=KnownIndices(source, number))


def _logic(op: str, decides: Number | None, inputs: KnownInputs, a: Any, b: Any) -> KnownValue | None:
    """Combine bits; ``decides`` determines the result whatever the other operand is."""
    are_bools = all(isinstance(side, bool) or getattr(side, "dtype", None) == torch.bool for side in (a, b))
    if decides and op.startswith("bitwise") and not are_bools:
        decides = None
    known = [fact for fact in _operands(inputs, a, b) if fact is not None]
    if op.startswith("logical"):
        known = [fact._replace(value=bool(fact.value)) for fact in known]
    settled = [fact for fact in known if decides is not None and fact.value == decides]
    if settled:
        return min(settled, key=lambda fact: (fact.exceptions, fact.basis))
    return pointwise_value(overload_of(op), inputs, a, b)


def _test(op: str, usual: bool, inputs: KnownInputs, tensor: torch.Tensor) -> KnownValue | None:
    """Test for finiteness: ``usual`` is the answer while nothing overflows."""
    if inputs.of(tensor) is None:
        return KnownValue(usual, KnownValueBasis.FINITE)
    return pointwise_value(overload_of(op), inputs, tensor)


def _assume_absent(_facts: KnownInputs, *_: object, **__: object) -> KnownValue:
    return KnownValue(False, KnownValueBasis.CHECKED)


def _reduce(
    name: str, inputs: KnownInputs, tensor: torch.Tensor, *dims: object, **_: object
) -> KnownValue | None:
    """Reduce by ``all`` or ``any``; along dimensions, unknown stays unknown, as it may select elements."""
    known = inputs.of(tensor)
    if known is not None:
        return KnownValue(bool(known.value), known.basis)
    return None if dims else KnownValue(getattr(inputs, name), KnownValueBasis.CHECKED)


def _sum(
    inputs: KnownInputs, tensor: torch.Tensor, dims: Sequence[int] | None = None, *_: object, **__: object
) -> KnownValue | None:
    """Sum integers, zeros and infinities; the rounding of other sums depends on the GPU's order."""
    known = inputs.of(tensor)
    if known is None:
        return None
    if isinstance(known.value, float):
        return known if not known.value or not math.isfinite(known.value) else None
    summed = math.prod(tensor.size(dim) for dim in dims) if dims else tensor.numel()
    return KnownValue(known.value * summed, known.basis)


def _nonzero(inputs: KnownInputs, mask: torch.Tensor) -> KnownIndices | None:
    """Return what is known of the indices that ``nonzero`` finds in a mask."""
    fact = inputs.known.mostly(mask) if mask.dim() == 1 else None
    if fact is None or fact.value or fact.basis is not KnownValueBasis.FILLED:
        return None  # what is only assumed of a mask bounds nothing
    return fact.selection


def _index(
    inputs: KnownInputs, tensor: torch.Tensor, indices: Sequence[object]
) -> KnownValue | KnownIndices | None:
    """Return what is known of ``tensor[index]``: elements of a vector, or some of its indices."""
    index = indices[0] if len(indices) == 1 else None
    dtypes = (torch.int64, torch.int32)
    if not isinstance(index, torch.Tensor) or index.dtype not in dtypes or tensor.dim() != 1:
        return None
    taken = inputs.known.selection(tensor)
    if taken is not None:
        return None if taken.others else taken  # an index may take one of the others several times
    chosen = inputs.known.selection(index) if index.dim() == 1 else None
    if chosen is None or not inputs.known.is_in_state(tensor, chosen.source):
        return None
    return KnownValue(chosen.value, exceptions=chosen.others)


def _cat(
    inputs: KnownInputs, tensors: Sequence[torch.Tensor], *_: object
) -> KnownValue | KnownIndices | None:
    """Join vectors: of indices, or of elements that mostly hold the same value."""
    if any(tensor.dim() != 1 for tensor in tensors):
        return None
    joined = union_of_known_indices((tensor.numel(), inputs.known.selection(tensor)) for tensor in tensors)
    if joined is not None:
        return joined
    known = [inputs.mostly(tensor) for tensor in tensors if tensor.numel()]
    facts = [fact for fact in known if fact is not None]
    if len({fact.value for fact in facts}) != 1 or len(facts) != len(known):
        return None
    return KnownValue(
        facts[0].value, max(fact.basis for fact in facts), sum(fact.exceptions for fact in facts)
    )


def found_inf_after_unscale(
    inputs: KnownInputs, gradients: Sequence[torch.Tensor], found_inf: torch.Tensor, _inv_scale: object
) -> KnownValue:
    """Return ``found_inf`` after unscaling: 1 if a gradient is known not to be finite, or else as before."""
    if any(_overflows(inputs, gradient) for gradient in gradients):
        return KnownValue(1.0)
    before = inputs.of(found_inf)
    return KnownValue(before.value if before else 0.0, KnownValueBasis.FINITE)


def _overflows(inputs: KnownInputs, tensor: torch.Tensor) -> bool:
    known, elements = inputs.of(tensor), inputs.known.elements(tensor)
    if elements is not None:
        return not bool(elements.values.isfinite().all())
    return known is not None and not math.isfinite(known.value)


def loss_scale_after_update(
    inputs: KnownInputs,
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> tuple[KnownValue | None, KnownValue | None]:
    """Return the loss scale and its growth tracker after an update.

    Source: ``amp_update_scale_cuda_kernel``, aten/src/ATen/native/cuda/AmpKernels.cu, PyTorch 2.14.
    """
    old, tracker, overflow = inputs.of(scale), inputs.of(growth_tracker), inputs.of(found_inf)
    if old is None or tracker is None or overflow is None:
        return None, None
    basis = max(old.basis, overflow.basis)
    if overflow.value:
        return KnownValue(old.value * backoff_factor, basis), KnownValue(0, basis)
    steps = int(tracker.value) + 1
    if steps != growth_interval:
        return KnownValue(old.value, basis), KnownValue(steps, basis)
    grown = round_to_dtype(old.value * growth_factor, torch.float32)
    grows = grown is not None and math.isfinite(grown)
    return KnownValue(grown if grows and grown else old.value, basis), KnownValue(0, basis)


_DECIDES = {"and": False, "or": True, "xor": None}
_USUAL = {"isfinite": True, "isnan": False, "isinf": False}

RULES: Mapping[str, PropagationRule] = {
    **{
        f"{name}.{kind}": partial(_compare, name, kind)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for kind in ("Tensor", "Scalar")
    },
    **{
        op: partial(_logic, op, decides)
        for name, decides in _DECIDES.items()
        for op in (f"logical_{name}", f"bitwise_{name}.Tensor", f"bitwise_{name}.Scalar")
    },
    **{op: partial(_test, op, usual) for op, usual in _USUAL.items()},
    "_to_copy": _unchanged,
    "clone": _unchanged,
    "max": _unchanged,
    "max.dim": _unchanged,
    "amax": _unchanged,
    "min": _unchanged,
    "min.dim": _unchanged,
    "amin": _unchanged,
    "all": partial(_reduce, "all"),
    "_is_all_true": partial(_reduce, "all"),
    "all.dim": partial(_reduce, "all"),
    "all.dims": partial(_reduce, "all"),
    "any": partial(_reduce, "any"),
    "_is_any_true": partial(_reduce, "any"),
    "any.dim": partial(_reduce, "any"),
    "any.dims": partial(_reduce, "any"),
    "sum": _sum,
    "sum.dim_IntList": _sum,
    "index.Tensor": _index,
    "cat": _cat,
    "nonzero": _nonzero,
    "isin.Tensor_Tensor": _assume_absent,
    "isin.Tensor_Scalar": _assume_absent,
}
"""ATen op -> its rule. ``found_inf_after_unscale`` and ``loss_scale_after_update`` cover two more ops."""


def union_of_known_indices(parts: Iterable[tuple[int, KnownIndices | None]]) -> KnownIndices | None:
    """Return what is known of all indices of several parts, each given by the most indices that it can hold.

    The value that most of them hold is the one with the fewest others.
    """
    parts = tuple(parts)
    merged = [
        kept._replace(
            others=sum(part.others if part and _agree(part, kept) else most for most, part in parts)
        )
        for _, kept in parts
        if kept is not None and kept.source.is_alive()
    ]
    return min(merged, key=lambda selection: selection.others, default=None)


def _agree(one: KnownIndices, other: KnownIndices) -> bool:
    """Return whether two selections are of elements of one tensor with one value."""
    of_one, of_other = one.source, other.source
    alive = of_one.is_alive() and of_other.is_alive()  # or one may have had the other's storage
    return alive and (of_one.storage, of_one.part, of_one.versions, one.value) == (
        of_other.storage,
        of_other.part,
        of_other.versions,
        other.value,
    )
