"""By what the loss of a slice of a batch is divided, so that the losses of slices make that of the batch.

    mean over what counts     loss of the batch = sum(loss_i * divisor_i) / sum(divisor_i)
    sum                       loss of the batch = sum(loss_i)

The loss's own graph says which it is: the node of a mean has the number of elements, that of a cross-entropy
the weight of the targets that count, that of a quotient its divisor. What is equal for every slice divides
nothing: ``LossRule`` learns that from two samples, together and each alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from memfit.card.detect_card import is_ghost_loaded
from memfit.dispatch_modes import without_dispatch_modes
from memfit.errors import UsageError
from memfit.strategies.mechanisms.numbers_of_forward import Number

_EQUAL = 1e-6
_MEAN, _SUM = 1, 2
"""PyTorch's numbers of reductions."""
_PASSING = ("ToCopy", "View", "Squeeze", "Clone", "Alias", "Neg")
"""Nodes whose result is in proportion to what they are passed."""
IN_LOOP = "Return the outputs, and compute the loss in the training loop."


_DIFFERS = "the model computes its loss differently for other samples."


@dataclass(frozen=True, slots=True)
class LossTerm:
    """One of the reductions whose sum a loss is."""

    elements: int
    """That it reduces."""
    divisors: tuple[Number, ...]
    """The number of elements of a mean first, or what a cross-entropy counts."""
    factors: tuple[Number, ...]
    is_mean: bool
    """Whether the first divisor is that of the reduction itself."""
    dividing: tuple[Any, ...]
    """The nodes that divide; None for the reduction itself."""


def terms_of_loss(loss: torch.Tensor) -> list[LossTerm]:
    """Return the reductions whose sum a loss is, from its graph.

    Raises:
        UsageError: the graph does not show them.

    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> [(term.elements, term.divisors) for term in terms_of_loss(x.mean() * 2 + x.square().sum() / 5)]
    [(6, (6,)), (6, (tensor(5),))]
    """
    return list(_terms(loss.grad_fn, (), (), ()))


def _terms(
    node: Any, divisors: tuple[Number, ...], factors: tuple[Number, ...], dividing: tuple[Any, ...]
) -> Iterator[LossTerm]:
    while node is not None:
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if (reduced := _reduced(node, name)) is not None:
            elements, mean = reduced
            nodes = (*[None] * len(mean), *dividing)
            yield LossTerm(elements, (*mean, *divisors), factors, bool(mean), nodes)
            return
        ahead = [each for each, _ in node.next_functions if each is not None]
        if name in ("Add", "Sub"):
            for each in ahead:
                yield from _terms(each, divisors, factors, dividing)
            return
        if len(ahead) != 1 or not (name in ("Div", "Mul") or name.startswith(_PASSING)):
            break
        if name == "Div":
            divisors, dividing = (*divisors, _number(node._saved_other)), (*dividing, node)
        if name == "Mul":
            other = node._saved_other
            factors = (*factors, _number(node._saved_self if other is None else other))
        node = ahead[0]
    last = "nothing" if node is None else node.name()
    raise UsageError(
        "batch_slices: the model returns its loss, and memfit cannot see whether the loss is a mean or a sum "
        f"over samples: its graph ends in {last}. {IN_LOOP}"
    )


def _number(saved: torch.Tensor) -> torch.Tensor:
    """Return what a node has saved; a Python number, which it keeps as a tensor, as another tensor.

    A dispatch mode is passed such a tensor as a number, and can run no operation of tensors on it.
    """
    if not _may_be_python_number(saved):
        return saved
    with without_dispatch_modes():
        return torch.tensor(saved.item(), dtype=saved.dtype)


def _may_be_python_number(number: Number) -> bool:
    if not isinstance(number, torch.Tensor) or number.is_cuda or number.dim():
        return False
    return number.dtype in (torch.int64, torch.float64)


def _reduced(node: Any, name: str) -> tuple[int, tuple[Number, ...]] | None:
    """Return how many elements a node reduces, and by what it divides their sum; None if it does not."""
    known: tuple[int, tuple[Number, ...]] | None = getattr(node, "reduction", None)
    if known is not None:
        return known  # ChunkedHead's
    if name == "Sum":
        return math.prod(node._saved_self_sym_sizes), ()
    if name == "Mean":
        elements = int(node._saved_self_sym_numel)
        return elements, (elements,)
    reduction = getattr(node, "_saved_reduction", None)
    if reduction not in (_MEAN, _SUM):
        return None
    elements = node._saved_self.numel()
    return elements, (getattr(node, "_saved_total_weight", elements),) if reduction == _MEAN else ()


class LossRule:
    """By what a model divides its loss.

    Args:
        pair: the loss of two samples, with its graph.
        single: those of each alone.
        passed: the model's arguments that every slice gets as they are: a loss that is divided by one of them
            is a sum.
        numbers: those that each of these forwards has computed. A divisor with a lower limit is made of one:
            ``loss.sum() / mask.sum().clamp(min=1)``.

    Raises:
        UsageError: the losses of slices do not make that of the batch.
    """

    def __init__(
        self,
        pair: torch.Tensor,
        single: Sequence[torch.Tensor],
        passed: Sequence[Any],
        numbers: Sequence[Sequence[Number]] = (),
    ) -> None:
        self._counts: list[int] = []
        """Which of the numbers of a forward, from its end, may be what the divisor is made of."""
        self._learned: list[list[float]] = []
        """Of each of the three: the divisor, and these."""
        whole, parts = terms_of_loss(pair), [terms_of_loss(each) for each in single]
        if any(len(part) != len(whole) for part in parts):
            raise UsageError(f"batch_slices: {_DIFFERS} {IN_LOOP}")
        self._varying = [
            self._varying_of(whole[term], [part[term] for part in parts], passed)
            for term in range(len(whole))
        ]
        """Of each term, which of its divisors depends on the slice; None for a sum."""
        self.is_quotient = not whole[0].is_mean
        """Whether the model divides, not the operation that reduces."""
        if len({each is None for each in self._varying}) > 1:
            raise UsageError(
                f"batch_slices: the model's loss adds a mean over samples to a sum over samples. {IN_LOOP}"
            )
        if self.is_quotient and numbers:
            self._find_counts([whole[0], *(part[0] for part in parts)], numbers)

    def _find_counts(self, terms: Sequence[LossTerm], numbers: Sequence[Sequence[Number]]) -> None:
        place = self._varying[0]
        if place is None and self._varying[1:]:
            return
        places = range(len(terms[0].divisors)) if place is None else [place]
        found = [[float(each) for each in reversed(of_call)] for of_call in numbers]
        for place in places:
            divisors = [float(term.divisors[place]) for term in terms]
            if self._varying[0] is None and divisors != [1, 1, 1]:
                continue  # a constant, and no lower limit
            for index, (pair, *single) in reversed([*enumerate(zip(*found, strict=False))]):
                rows = [*zip(divisors, (pair, *single), strict=True)]
                if math.isclose(pair, sum(single), rel_tol=_EQUAL) and _total(rows[1:], rows) is not None:
                    self._counts.append(-1 - index)
            if self._counts:
                self._varying[0] = place
                self._learned = [
                    [divisor, *(of_call[-1 - index] for index in self._counts)]
                    for divisor, of_call in zip(divisors, found, strict=True)
                ]
                return

    @property
    def needs_numbers(self) -> bool:
        """Whether the divisor of a batch is made of numbers that the forward of each slice computes."""
        return bool(self._counts)

    def counts(self, numbers: Sequence[Number]) -> list[Number]:
        """Return those of a forward's numbers that the divisor may be made of."""
        return [numbers[index] if -index <= len(numbers) else math.nan for index in self._counts]

    def divisor_of(self, rows: Sequence[Sequence[float]]) -> float:
        """Return the divisor of a batch, from those of slices, each with its counts."""
        for place in range(1, len(self._learned[0])):
            own, learned = ([(row[0], row[place]) for row in each] for each in (rows, self._learned))
            if (total := _total(own, [*own, *learned])) is not None:
                return total
        raise UsageError(
            "batch_slices: the model divides its loss by a number with a lower limit, as in "
            "mask.sum().clamp(min=1), and memfit cannot see what the number is for the batch, where it is "
            f"{', '.join(f'{row[0]:.4g}' for row in rows)} for slices. {IN_LOOP}"
        )

    @staticmethod
    def _varying_of(whole: LossTerm, parts: Sequence[LossTerm], passed: Sequence[Any]) -> int | None:
        if whole.elements != sum(part.elements for part in parts):
            alone = " and ".join(str(part.elements) for part in parts)
            raise UsageError(
                "batch_slices: the model's loss combines samples with each other, or adds what does not "
                f"depend on them: it reduces {whole.elements} elements for two samples, and {alone} for each "
                f"alone. {IN_LOOP}"
            )
        all_terms = (whole, *parts)
        if len({(len(each.divisors), len(each.factors)) for each in all_terms}) > 1:
            raise UsageError(f"batch_slices: {_DIFFERS} {IN_LOOP}")
        divisors, factors = (
            [place for place, same in enumerate(zip(*column, strict=True)) if not _is_constant(same, passed)]
            for column in ([each.divisors for each in all_terms], [each.factors for each in all_terms])
        )
        if len(divisors) > 1 or factors:
            raise UsageError(
                "batch_slices: the model returns its loss, and multiplies or divides it by several numbers "
                f"that depend on the batch. {IN_LOOP}"
            )
        return divisors[0] if divisors else None

    def divisors(self, loss: torch.Tensor) -> list[Number]:
        """Return by what each term of a slice's loss is divided; empty for a sum."""
        divisors = []
        for term, place in zip(terms_of_loss(loss), self._varying, strict=True):
            if place is None:
                continue
            divisors.append(term.divisors[place])
            if (node := term.dividing[place]) is not None:
                node.register_hook(partial(_without_infinite, term.divisors[place]))
        return divisors

    def python_numbers(self, loss: torch.Tensor) -> list[float]:
        """Return the Python numbers that multiply or divide every slice's loss alike."""
        found: list[float] = []
        for term, place in zip(terms_of_loss(loss), self._varying, strict=True):
            same = [each for index, each in enumerate(term.divisors) if index != place]
            found += map(float, filter(_may_be_python_number, (*same, *term.factors)))
        return found

    def joined(self, losses: Sequence[torch.Tensor], numbers: Sequence[Sequence[Number]]) -> torch.Tensor:
        """Return the loss of a batch, of those of its slices, with their graphs and numbers."""
        slices = SumOfSlices(self)
        for each, of_forward in zip(losses, numbers, strict=True):
            slices.add(each, self.counts(of_forward))
        return slices.loss()


class SumOfSlices:
    """The losses of the slices of a batch, added up."""

    def __init__(self, rule: LossRule) -> None:
        self._rule = rule
        self._sum: torch.Tensor | None = None
        self._dtype = torch.float32
        self._divisors: list[list[Number]] = []
        self.python_numbers: list[float] = []
        """Those that multiply or divide the first slice's loss."""
        self._rows: list[list[Number]] = []
        self.divisor: Number | None = None
        """By what the sum of all slices is divided; None for a sum."""

    def add(self, loss: torch.Tensor, counts: Sequence[Number] = ()) -> torch.Tensor:
        """Add a slice's loss, and return what it adds, with its graph.

        Args:
            loss: of the slice.
            counts: numbers that its forward has computed; the divisor may be made of them.
        """
        divisors, self._dtype = self._rule.divisors(loss), loss.dtype
        numbers = self._rule.python_numbers(loss)
        if self._sum is None:
            self.python_numbers = numbers
        elif numbers != self.python_numbers:
            raise UsageError(
                "batch_slices: the model returns its loss, and multiplies or divides it by a Python number "
                f"that it computes from the samples. {IN_LOOP}"
            )
        own = loss if loss.dtype == torch.float64 else loss.float()
        if divisors:
            # Without targets that count, a mean is 0 / 0.
            first = divisors[0]
            own = _or_zero(own * first, first)
            self._rows += [[first, *counts]] if counts else []
            self.divisor = first if self.divisor is None else self.divisor + first
        if divisors[1:]:
            self._divisors.append(divisors)
        self._sum = own.detach() if self._sum is None else self._sum + own.detach()
        return own

    def loss(self) -> torch.Tensor:
        """Return the loss of the batch.

        Raises:
            UsageError: its terms weigh the slices differently.
        """
        if self._sum is None:
            raise AssertionError("no slice has run")
        _expect_same_weights(self._divisors)
        if self._rule.needs_numbers:
            self.divisor = self._rule.divisor_of([[float(each) for each in row] for row in self._rows])
        return (self._sum if self.divisor is None else self._sum / self.divisor).to(self._dtype)


def _total(slices: Sequence[tuple[float, float]], known: Sequence[tuple[float, float]]) -> float | None:
    """Return the divisor of a batch, from those of slices, and the counts that they may be made of.

    As in ``max(count, least) + added``. None if they are not, or if that does not show ``added``.
    """
    least, added = min(divisor for divisor, _ in known), min(divisor - count for divisor, count in known)
    count, most = sum(each for _, each in slices), max(each for _, each in known)
    fits = all(math.isclose(each, max(own + added, least), rel_tol=_EQUAL) for each, own in known)
    if not fits or added < -_EQUAL * least:
        return None
    if least == max(divisor for divisor, _ in known) and count > most and added > _EQUAL * least:
        return None
    return max(count + added, least)


def _without_infinite(divisor: Number, gradients: Sequence[Any], _: Any) -> tuple[Any, ...]:
    """Return the gradients of a quotient: none where it divides by 0, in a slice where nothing counts."""
    return tuple(each if each is None else _or_zero(each, divisor) for each in gradients)


def _or_zero(number: torch.Tensor, divisor: Number) -> torch.Tensor:
    """Return 0 instead of a number where its divisor is 0."""
    is_known = not (isinstance(divisor, torch.Tensor) and divisor.is_cuda)
    if is_known and divisor != 0:
        return number
    return torch.where(torch.as_tensor(divisor == 0, device=number.device), 0, number)


def _is_constant(numbers: Sequence[Number], passed: Sequence[Any]) -> bool:
    """Return whether a number does not depend on which samples the loss is of.

    What is computed from the samples may be equal by chance; a Python number that is equal for two samples
    and for each of them is taken for a constant.
    """
    first, *others = numbers
    if not isinstance(first, torch.Tensor):
        return first != 0 and all(each == first for each in others)
    if any(isinstance(each, torch.Tensor) and first.is_set_to(each) for each in passed):
        return True
    if all(isinstance(each, torch.Tensor) and first.is_set_to(each) for each in others):
        return True
    is_python_number = _may_be_python_number(first) and float(first) != 0
    return is_python_number and all(float(each) == float(first) for each in others)


def _expect_same_weights(divisors: Sequence[Sequence[Number]]) -> None:
    """Check that the terms of a loss weigh the slices of a batch alike."""
    if is_ghost_loaded():
        return
    numbers = [[float(each) for each in of_slice] for of_slice in divisors]
    totals = [sum(column) for column in zip(*numbers, strict=True)]
    for of_slice in numbers:
        if any(
            not math.isclose(each * totals[0], of_slice[0] * total, rel_tol=1e-6)
            for each, total in zip(of_slice, totals, strict=True)
        ):
            raise UsageError(
                "batch_slices: the model's loss adds means over different numbers of elements, which weigh "
                f"the slices of a batch differently. {IN_LOOP}"
            )
