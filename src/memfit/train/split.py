"""Splitting a batch into micro-batches.

tensors             along their first dimension, if that is the batch's size
tuples, dicts       entry by entry
lists               of tensors of one length: entry by entry, as a DataLoader makes them
                    of anything else: as samples, a slice to each micro-batch
all else            to every micro-batch as it is
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from memfit.errors import UsageError


def batch_size(batch: object) -> int:
    """Return the number of samples of a batch.

    Raises:
        UsageError: there is nothing in it that has samples, or its parts do not agree.

    >>> batch_size({"x": torch.zeros(8, 3), "y": torch.zeros(8), "epoch": 3})
    8
    """
    sizes = set(_sizes(batch))
    if len(sizes) == 1:
        return sizes.pop()
    found = f"parts of {sorted(sizes)} samples" if sizes else "nothing that has samples"
    raise UsageError(
        f"Cannot tell the size of a batch with {found}. Give the engine a function that splits it: "
        "split=lambda batch, sizes: [...]."
    )


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """Split a batch into parts of the given sizes.

    Args:
        batch: tensors, and tuples, lists and dicts of them.
        sizes: samples of each part; together those of the batch.

    >>> [part["x"].shape[0] for part in split({"x": torch.zeros(5, 2)}, [3, 2])]
    [3, 2]
    """
    whole, begin, parts = sum(sizes), 0, []
    for size in sizes:
        parts.append(_part(batch, slice(begin, begin + size), whole))
        begin += size
    return parts


def even_sizes(samples: int, parts: int) -> list[int]:
    """Return sizes that differ by one at most, the larger first; no part is empty.

    >>> even_sizes(10, 4), even_sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    parts = min(parts, samples)
    small, more = divmod(samples, parts)
    return [small + 1] * more + [small] * (parts - more)


def _sizes(value: object) -> Iterator[int]:
    if isinstance(value, torch.Tensor):
        if value.dim():
            yield value.shape[0]
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _sizes(entry)
    elif isinstance(value, list) and not _is_structure(value):
        yield len(value)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _sizes(entry)


def _is_structure(values: list[Any]) -> bool:
    """Whether a list is a batch's parts, rather than its samples."""
    lengths = {
        value.shape[0] if isinstance(value, torch.Tensor) and value.dim() else None for value in values
    }
    return len(lengths) == 1 and None not in lengths


def _part(value: Any, part: slice, whole: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[part] if value.dim() and value.shape[0] == whole else value
    if isinstance(value, Mapping):
        parts = {name: _part(entry, part, whole) for name, entry in value.items()}
        return parts if type(value) is dict else type(value)(parts)  # type: ignore[call-arg]
    if isinstance(value, list) and not _is_structure(value):
        return value[part] if len(value) == whole else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_part(entry, part, whole) for entry in value))
    if isinstance(value, tuple | list):
        return type(value)(_part(entry, part, whole) for entry in value)
    return value
