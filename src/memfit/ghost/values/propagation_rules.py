"""What is known of a result from what is known of its inputs: the whole policy, one table (``RULES``).

    comparisons   eq ne lt le gt ge                     of two known operands
    logic         & | ^ ~ and the logical_ forms        False & anything is False, True | anything is True
    extremes      max min amax amin                     the value itself
    reductions    all any sum                           all() of unknown values True, any() False: checked
    finiteness    isfinite isnan isinf                  True, False, False: finite
    membership    isin                                  False: checked (no token ends the text)
    grad scaler   _amp_*                                gradients are finite; the scale is exact

A rule looks at the arguments before PyTorch's own kernel runs; what it says is noted once the kernel has made
all its allocations and autograd has counted up the versions of what it wrote. The overrides (``values.py``)
sit on autograd's key, because above it nothing writes into a tensor without that count: a kernel that fills
a buffer and then works on it calls below that key, unheard.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit.ghost.values.known_values import Basis, Known, KnownValues, Number, known_number, rounded


@dataclass(frozen=True, slots=True)
class Facts:
    """What a rule may look at.

    ``all`` and ``any`` are what those reductions over a whole tensor of unknown values are taken to find.
    """

    values: KnownValues
    all: bool = True
    any: bool = False

    def of(self, operand: object) -> Known | None:
        """Return what is known of a tensor; a plain number is known."""
        if isinstance(operand, torch.Tensor):
            return self.values.get(operand)
        return known_number(operand)

    def mostly(self, operand: object) -> Known | None:
        """Return what is known of a tensor but for some elements; a plain number is known."""
        if isinstance(operand, torch.Tensor):
            return self.values.mostly(operand)
        return known_number(operand)


Rule = Callable[..., Known | None]
"""``rule(facts, *arguments, **keywords)`` of an op: what its first result will hold."""


def _same(facts: Facts, tensor: torch.Tensor, *_: object, **__: object) -> Known | None:
    return facts.of(tensor)


def _spread(known: Known, operand: object, operands: Sequence[object]) -> Known:
    """Return what is known of an operand as it is once spread over the shape of an elementwise result."""
    if not known.exceptions or not isinstance(operand, torch.Tensor):
        return known
    shapes = [other.shape for other in operands if isinstance(other, torch.Tensor)]
    elements = math.prod(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    return known._replace(exceptions=known.exceptions * (elements // operand.numel()))


def _operands(facts: Facts, *operands: object) -> list[Known | None]:
    """Return what is known of each operand of an elementwise op, spread over its result."""
    known = ((facts.mostly(operand), operand) for operand in operands)
    return [fact and _spread(fact, operand, operands) for fact, operand in known]


def _compare(function: Callable[[Any, Any], bool], facts: Facts, a: Any, b: Any) -> Known | None:
    left, right = _operands(facts, a, b)
    if left is None or right is None:
        return None
    dtype = torch.result_type(a, b)  # 0.1 is another number in half than in float
    x, y = rounded(left.value, dtype), rounded(right.value, dtype)
    return None if x is None or y is None else _combined(function(x, y), left, right)


def _combined(value: Number, left: Known, right: Known) -> Known:
    return Known(value, max(left.basis, right.basis), left.exceptions + right.exceptions)


def _logic(
    function: Callable[[Any, Any], Number], decides: bool | None, facts: Facts, *sides: object
) -> Known | None:
    """Combine truths; ``decides`` is the one that settles the result whatever the other side holds."""
    known = [fact._replace(value=bool(fact.value)) for fact in _operands(facts, *sides) if fact is not None]
    return _settled(known, decides) or (
        _combined(function(known[0].value, known[1].value), *known) if len(known) == len(sides) else None
    )


def _settled(known: Sequence[Known], decides: Number | None) -> Known | None:
    """Return the surest of the sides that settle a result, where one does."""
    settled = [fact for fact in known if decides is not None and fact.value == decides]
    return min(settled, key=lambda fact: (fact.exceptions, fact.basis), default=None)


def _bitwise(
    function: Callable[[Any, Any], Number], decides: bool | None, facts: Facts, *sides: object
) -> Known | None:
    """Combine bits: as ``_logic`` between bools; among integers both sides must be known, or one be 0."""
    if all(isinstance(side, bool) or getattr(side, "dtype", None) == torch.bool for side in sides):
        return _logic(function, decides, facts, *sides)
    known = [fact for fact in _operands(facts, *sides) if fact is not None]
    settled = _settled(known, 0) if function is operator.and_ else None
    return settled or (
        _combined(function(known[0].value, known[1].value), *known) if len(known) == len(sides) else None
    )


def _invert(facts: Facts, tensor: torch.Tensor) -> Known | None:
    known = facts.mostly(tensor)
    if known is None:
        return None
    return known._replace(value=not known.value if tensor.dtype == torch.bool else ~int(known.value))


def _not(facts: Facts, tensor: torch.Tensor) -> Known | None:
    known = facts.mostly(tensor)
    return None if known is None else known._replace(value=not known.value)


def _test(function: Callable[[float], bool], usual: bool, facts: Facts, tensor: torch.Tensor) -> Known:
    """Test for finiteness: ``usual`` is the answer while nothing overflows."""
    known = facts.of(tensor)
    return Known(usual, Basis.FINITE) if known is None else Known(function(known.value), known.basis)


def _absent(_facts: Facts, *_: object, **__: object) -> Known:
    return Known(False, Basis.CHECKED)


def _reduce(name: str, facts: Facts, tensor: torch.Tensor, *dims: object, **_: object) -> Known | None:
    """Reduce by ``all`` or ``any``; along dimensions, the unknown stays unknown: it may select elements."""
    known = facts.of(tensor)
    if known is not None:
        return Known(bool(known.value), known.basis)
    return None if dims else Known(getattr(facts, name), Basis.CHECKED)


def _sum(facts: Facts, tensor: torch.Tensor, *dims: Any, dtype: torch.dtype | None = None) -> Known | None:
    """Sum whole numbers over the whole tensor; sums of fractions round in an order only a GPU knows."""
    known = facts.of(tensor)
    if known is None or dims or dtype is not None or isinstance(known.value, float):
        return None
    return Known(known.value * tensor.numel(), known.basis)


def unscaled(facts: Facts, _gradients: object, found_inf: torch.Tensor, _inv_scale: object) -> Known:
    """Say what ``found_inf`` holds after unscaling: finite gradients leave it as it was, 0 at first."""
    before = facts.of(found_inf)
    return Known(before.value if before else 0.0, Basis.FINITE)


def updated_scale(
    facts: Facts,
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> tuple[Known | None, Known | None]:
    """Say what the loss scale and its growth tracker hold after an update.

    Source: ``amp_update_scale_cuda_kernel``, aten/src/ATen/native/cuda/AmpKernels.cu, PyTorch 2.14.
    """
    old, tracker, overflow = facts.of(scale), facts.of(growth_tracker), facts.of(found_inf)
    if old is None or tracker is None or overflow is None:
        return None, None
    basis = max(old.basis, overflow.basis)
    if overflow.value:
        return Known(old.value * backoff_factor, basis), Known(0, basis)
    steps = int(tracker.value) + 1
    if steps != growth_interval:
        return Known(old.value, basis), Known(steps, basis)
    grown = rounded(old.value * growth_factor, torch.float32)
    grows = grown is not None and math.isfinite(grown)
    return Known(grown if grows and grown else old.value, basis), Known(0, basis)


_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_LOGIC = {"and": (operator.and_, False), "or": (operator.or_, True), "xor": (operator.xor, None)}

RULES: Mapping[str, Rule] = {
    **{
        f"{name}.{kind}": partial(_compare, f)
        for name, f in _COMPARISONS.items()
        for kind in ("Tensor", "Scalar")
    },
    **{f"logical_{name}": partial(_logic, *how) for name, how in _LOGIC.items()},
    **{
        f"bitwise_{name}.{kind}": partial(_bitwise, *how)
        for name, how in _LOGIC.items()
        for kind in ("Tensor", "Scalar")
    },
    "logical_not": _not,
    "bitwise_not": _invert,
    "max": _same,
    "max.dim": _same,
    "amax": _same,
    "min": _same,
    "min.dim": _same,
    "amin": _same,
    "all": partial(_reduce, "all"),
    "_is_all_true": partial(_reduce, "all"),
    "all.dim": partial(_reduce, "all"),
    "all.dims": partial(_reduce, "all"),
    "any": partial(_reduce, "any"),
    "_is_any_true": partial(_reduce, "any"),
    "any.dim": partial(_reduce, "any"),
    "any.dims": partial(_reduce, "any"),
    "sum": _sum,
    "isfinite": partial(_test, math.isfinite, True),
    "isnan": partial(_test, math.isnan, False),
    "isinf": partial(_test, math.isinf, False),
    "isin.Tensor_Tensor": _absent,
    "isin.Tensor_Scalar": _absent,
}
"""Op of ATen -> its rule; the two that write several arguments are ``unscaled`` and ``updated_scale``."""
