"""What a tuple or a list in a batch is: columns, or samples.

columns    an entry for each field of a sample, as a DataLoader makes them of tuples
samples    an entry for each sample, as a ``collate_fn`` of one's own may leave them

[images, labels, paths], [x, {"y": y}]      entries of several kinds: columns
[[image, image], [target, target]]          or sequences of several kinds
["a.png", "b.png"]                          plain values: samples
[(image, 3), (image, 7)]                    numbers inside: samples, collating makes tensors of them
[image, image], [{"boxes": b}, {...}]       either: as many as the batch has samples, or columns of that
                                            length; the rest of the batch may tell
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch

_ARRAYS = (torch.Tensor, np.ndarray)
_TENSORS: frozenset[Any] = frozenset(("rows",))
_PLAIN: frozenset[Any] = frozenset(("plain",))
_CHANNELS, _IMAGE = 3, 3
"""Channels of an image in colour, and its dimensions."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What a sequence may be, by what is in it; neither: it has no part in the batch's size."""

    columns: bool
    samples: bool

    @classmethod
    def of(cls, value: Sequence[Any], *, outer: bool) -> "Readings":
        """Look at a sequence.

        Args:
            value: a tuple or a list.
            outer: whether it is the batch itself. A tuple then is what a function returned: columns.
        """
        kinds: frozenset[Any] = _TENSORS if all(map(has_rows, value)) and value else _kinds(value)
        if kinds == _PLAIN:
            return cls(False, isinstance(value, list) or _is_text(value))
        if len(kinds) != 1 or (outer and isinstance(value, tuple)) or hasattr(value, "_fields"):
            return cls(bool(kinds), False)
        return cls(kinds == _TENSORS or not any(_is_bare(entry) for entry in value), True)


def has_rows(value: object) -> TypeGuard[Any]:
    """Whether a value is a tensor or an array with a first dimension."""
    return isinstance(value, _ARRAYS) and value.ndim > 0


def sizes_of(value: object, *, outer: bool = False) -> set[int] | None:
    """Return the numbers of samples that a batch, or a part of one, may have; None if it has no say."""
    if has_rows(value):
        return {value.shape[0]}
    if isinstance(value, Mapping):
        return common_sizes(value.values())
    if not isinstance(value, tuple | list):
        return None
    readings = Readings.of(value, outer=outer)
    sizes = common_sizes(value) if readings.columns else None
    return (sizes or set()) | {len(value)} if readings.samples else sizes


def common_sizes(values: Iterable[object]) -> set[int] | None:
    """Return the numbers of samples that all of these may have."""
    sizes = [found for value in values if (found := sizes_of(value)) is not None]
    return set.intersection(*sizes) if sizes else None


def lengths(value: object, *, outer: bool = False) -> Iterator[int]:
    """Yield the length of each part, where sequences that may be columns are."""
    if has_rows(value):
        yield value.shape[0]
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from lengths(entry)
    elif isinstance(value, tuple | list):
        readings = Readings.of(value, outer=outer)
        if readings.columns:
            for entry in value:
                yield from lengths(entry)
        elif readings.samples:
            yield len(value)


def looks_like_samples(value: Sequence[Any], *, alike: bool) -> bool:
    """Whether columns would be too strange to take a sequence for them when it may be samples.

    Args:
        value: of mappings, of tensors, or of sequences of these.
        alike: whether tensors of one shape are strange, and not images only.
    """
    if any(isinstance(entry, Mapping) for entry in value):
        return True
    nested = [entry for entry in value if isinstance(entry, tuple | list)]
    if nested:
        return any(looks_like_samples(entry, alike=alike) for entry in nested)
    tensors = [entry for entry in value if has_rows(entry)]
    if alike:
        return len({each.shape for each in tensors}) == 1 and tensors[0].ndim > 1
    return all(each.ndim == _IMAGE and each.shape[0] == _CHANNELS for each in tensors) and bool(tensors)


def _kinds(values: Iterable[object]) -> frozenset[Any]:
    """Return what kinds of things there are; of sequences, what they are sequences of."""
    kinds = frozenset(map(_kind, values))
    return kinds - {frozenset()} or kinds


def _kind(value: object) -> Any:
    if has_rows(value):
        return "rows"
    if isinstance(value, Mapping):
        return "mapping"
    return _kinds(value) if isinstance(value, tuple | list) else "plain"


def _is_text(value: Iterable[object]) -> bool:
    return all(isinstance(entry, str | bytes) for entry in value)


def _is_bare(value: object) -> bool:
    """Whether there is something in a value that collating would have made a tensor or a list of."""
    if isinstance(value, Mapping):
        return any(_is_bare(entry) for entry in value.values())
    if isinstance(value, tuple | list):
        return not _is_text(value) and any(_is_bare(entry) for entry in value)
    return not has_rows(value)
