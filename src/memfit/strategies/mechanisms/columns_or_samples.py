"""Whether a tuple or a list in a batch holds columns or samples.

columns    one entry per field of a sample, as a DataLoader collates tuples
samples    one entry per sample, as a custom ``collate_fn`` may leave them

[images, labels, paths], [x, {"y": y}]      entries of several kinds: columns
[[image, image], [target, target]]          or sequences of several kinds
["a.png", "b.png"]                          plain values: samples
[(image, 3), (image, 7)]                    numbers inside: samples, since collating makes tensors of them
[image, image], [{"boxes": b}, {...}]       either: as many entries as the batch has samples, or columns of
                                            that length; the rest of the batch may decide, or an earlier one
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import numpy as np
import torch

_ARRAYS = (torch.Tensor, np.ndarray)
_TENSORS: frozenset[Any] = frozenset(("rows",))
_PLAIN: frozenset[Any] = frozenset(("plain",))
Path = tuple[Any, ...]
"""Where a value is in a batch: names of mappings, indices of columns."""
Role = Literal["rows", "samples", "columns", "shared"]
"""What a value holds: tensors and sequences one entry per sample, columns, or neither."""
Roles = Mapping[Path, Role]
"""What earlier batches have shown."""
_CHANNELS, _IMAGE = 3, 3
"""Channels of a colour image, and dimensions of its tensor."""


@dataclass(frozen=True, slots=True)
class ListLayout:
    """What a sequence may hold, judged by its entries; if neither, it says nothing about the batch's size."""

    columns: bool
    samples: bool

    @classmethod
    def of(cls, value: Sequence[Any], *, outer: bool) -> "ListLayout":
        """Classify a sequence.

        Args:
            value: a tuple or a list.
            outer: whether it is the batch itself. A tuple then is a function's result: columns.
        """
        kinds: frozenset[Any] = _TENSORS if all(map(has_batch_dimension, value)) and value else _kinds(value)
        if kinds == _PLAIN:
            return cls(False, isinstance(value, list) or _is_text(value))
        if len(kinds) != 1 or (outer and isinstance(value, tuple)) or hasattr(value, "_fields"):
            return cls(bool(kinds), False)
        return cls(kinds == _TENSORS or not any(_is_bare(entry) for entry in value), True)


def has_batch_dimension(value: object) -> TypeGuard[Any]:
    """Return whether a value is a tensor or an array with at least one dimension."""
    return isinstance(value, _ARRAYS) and value.ndim > 0


def possible_batch_sizes(
    value: object, roles: Roles, path: Path = (), *, outer: bool = False
) -> set[int] | None:
    """Return the possible numbers of samples of a batch or a part; None if it does not determine any."""
    role = roles.get(path)
    if role == "shared":
        return None
    if has_batch_dimension(value):
        return {value.shape[0]}
    if isinstance(value, Mapping):
        return common_batch_sizes(value.items(), roles, path)
    if not isinstance(value, tuple | list):
        return None
    if role == "samples":
        return {len(value)}
    layout = ListLayout.of(value, outer=outer)
    sizes = common_batch_sizes(enumerate(value), roles, path) if layout.columns else None
    return (sizes or set()) | {len(value)} if layout.samples and role != "columns" else sizes


def common_batch_sizes(entries: Iterable[tuple[Any, object]], roles: Roles, path: Path) -> set[int] | None:
    """Return the numbers of samples that are possible for all entries, each with its name or index."""
    found = (possible_batch_sizes(value, roles, (*path, name)) for name, value in entries)
    sizes = [each for each in found if each is not None]
    return set.intersection(*sizes) if sizes else None


def sample_counts_of_batch_values(value: object, *, outer: bool = False) -> Iterator[int]:
    """Yield the length of each part, reading sequences that may be columns as columns."""
    if has_batch_dimension(value):
        yield value.shape[0]
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from sample_counts_of_batch_values(entry)
    elif isinstance(value, tuple | list):
        layout = ListLayout.of(value, outer=outer)
        if layout.columns:
            for entry in value:
                yield from sample_counts_of_batch_values(entry)
        elif layout.samples:
            yield len(value)


def looks_like_samples(value: Sequence[Any], *, alike: bool) -> bool:
    """Return whether a sequence that may be either is unlikely to be columns.

    Args:
        value: a sequence of mappings, of tensors, or of sequences of these.
        alike: whether tensors of one shape count as unlikely columns, not only images.
    """
    if any(isinstance(entry, Mapping) for entry in value):
        return True
    nested = [entry for entry in value if isinstance(entry, tuple | list)]
    if nested:  # an image with its boxes, or the images of a batch
        return any(looks_like_samples(entry, alike=alike) or any(map(_is_image, entry)) for entry in nested)
    tensors = [entry for entry in value if has_batch_dimension(entry)]
    if alike:
        return len({each.shape for each in tensors}) == 1 and tensors[0].ndim > 1
    return all(map(_is_image, tensors)) and bool(tensors)


def _is_image(value: object) -> bool:
    """Return whether a value can be one colour image."""
    return has_batch_dimension(value) and value.ndim == _IMAGE and value.shape[0] == _CHANNELS


def _kinds(values: Iterable[object]) -> frozenset[Any]:
    """Return the kinds of values; for sequences, the kinds of their entries."""
    kinds = frozenset(map(_kind, values))
    return kinds - {frozenset()} or kinds


def _kind(value: object) -> Any:
    if has_batch_dimension(value):
        return "rows"
    if isinstance(value, Mapping):
        return "mapping"
    return _kinds(value) if isinstance(value, tuple | list) else "plain"


def _is_text(value: Iterable[object]) -> bool:
    return all(isinstance(entry, str | bytes) for entry in value)


def _is_bare(value: object) -> bool:
    """Return whether a value contains something that collating would have turned into a tensor or a list."""
    if isinstance(value, Mapping):
        return any(_is_bare(entry) for entry in value.values())
    if isinstance(value, tuple | list):
        return not _is_text(value) and any(_is_bare(entry) for entry in value)
    return not has_batch_dimension(value)
