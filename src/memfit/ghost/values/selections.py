"""What is known of indices that a script has searched for: it bounds what a search among them finds.

A detection model samples some of its proposals, and searches the samples for those that show an object:

    negative = torch.where(labels == 0)[0]       indices of zeros in labels
    mask[negative[order]] = 1                    selects zeros
    sampled = torch.where(mask | positive)[0]    selects zeros, and as many others as positive selects
    labels[sampled] > 0                          true for these others at most
"""

from collections.abc import Iterable, Sequence

import torch

from memfit.ghost.values.known_values import Basis, Known, KnownValues, Number, Selection, rounded

_INDICES = (torch.int64, torch.int32)


def where_equal(known: KnownValues, tensor: object, number: Number) -> Known | None:
    """Return the result of ``tensor == number``: where it is true, an unknown vector holds the number."""
    if not isinstance(tensor, torch.Tensor) or tensor.dim() != 1 or tensor.is_floating_point():
        return None
    source = known.state(tensor) if rounded(number, tensor.dtype) == number else None
    if source is None:
        return None
    return Known(False, exceptions=tensor.numel(), selection=Selection(source, number))


def found_by_nonzero(known: KnownValues, mask: torch.Tensor) -> Selection | None:
    """Return what is known of the indices that ``nonzero`` finds in a mask."""
    fact = known.mostly(mask) if mask.dim() == 1 else None
    if fact is None or fact.value or fact.basis is not Basis.FILLED:
        return None  # what is only assumed of a mask bounds nothing
    return fact.selection


def indexed(known: KnownValues, tensor: torch.Tensor, indices: Sequence[object]) -> Known | Selection | None:
    """Return what is known of ``tensor[index]``: elements of a vector, or some of its indices."""
    index = indices[0] if len(indices) == 1 else None
    if not isinstance(index, torch.Tensor) or index.dtype not in _INDICES or tensor.dim() != 1:
        return None
    taken = known.selection(tensor)
    if taken is not None:
        return None if taken.others else taken  # an index may take one of the others several times
    chosen = known.selection(index) if index.dim() == 1 else None
    if chosen is None or not known.is_in_state(tensor, chosen.source):
        return None
    return Known(chosen.value, exceptions=chosen.others)


def union(parts: Iterable[tuple[int, Selection | None]]) -> Selection | None:
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


def _agree(one: Selection, other: Selection) -> bool:
    """Return whether two selections are of elements of one tensor with one value."""
    of_one, of_other = one.source, other.source
    alive = of_one.is_alive() and of_other.is_alive()  # or one may have had the other's storage
    return alive and (of_one.storage, of_one.part, of_one.version, one.value) == (
        of_other.storage,
        of_other.part,
        of_other.version,
        other.value,
    )
