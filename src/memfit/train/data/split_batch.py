"""Split a batch into micro-batches.

tensors, arrays     along their first dimension, if that is the batch's size
dicts               entry by entry
tuples, lists       columns entry by entry, samples in slices: ``batch_layout`` decides which
anything else       goes unchanged to every micro-batch
"""

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.train.data.batch_layout import (
    SequenceLayout,
    common_sizes,
    has_rows,
    lengths,
    looks_like_samples,
    sizes_of,
)

_ADVICE = (
    "Pass two functions to memfit.Engine: size=lambda batch: ..., which returns the "
    "number of samples, and split=lambda batch, sizes: [...], which returns parts of "
    "those sizes."
)


def batch_size(batch: object) -> int:
    """Return the number of samples of a batch.

    Raises:
        UsageError: nothing in the batch has samples, or its parts disagree.

    >>> batch_size({"x": torch.zeros(8, 3), "y": torch.zeros(8), "epoch": 3})
    8
    """
    sizes = sizes_of(batch, outer=True) or set()
    if len(sizes) == 1:
        return sizes.pop()
    found = set(lengths(batch, outer=True))
    if len(found) == 1 and found <= sizes:
        return found.pop()
    parts = (
        f"its parts have the lengths {', '.join(map(str, sorted(found)))}"
        if found
        else "it contains no tensors, arrays or lists of samples"
    )
    raise UsageError(f"Cannot determine the number of samples in a batch: {parts}. {_ADVICE}")


def split(batch: Any, sizes: list[int]) -> list[Any]:
    """Split a batch into parts of the given sizes.

    Args:
        batch: tensors, and tuples, lists and dicts of them.
        sizes: samples of each part; together those of the batch.

    Raises:
        UsageError: a list may hold samples or columns.

    >>> [part["x"].shape[0] for part in split({"x": torch.zeros(5, 2)}, [3, 2])]
    [3, 2]
    """
    if len(sizes) == 1:
        return [batch]
    if isinstance(batch, torch.Tensor):
        return list(torch.split(batch, sizes))
    splitter, begin, parts = _Splitter(batch, sum(sizes)), 0, []
    for size in sizes:
        parts.append(splitter.part(batch, slice(begin, begin + size), outer=True))
        begin += size
    return parts


def even_sizes(samples: int, parts: int) -> list[int]:
    """Return sizes that differ by at most one, the larger first; no part is empty.

    >>> even_sizes(10, 4), even_sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    parts = min(parts, samples)
    small, more = divmod(samples, parts)
    return [small + 1] * more + [small] * (parts - more)


class _Splitter:
    """Splits one batch with a known number of samples."""

    def __init__(self, batch: object, size: int) -> None:
        self._size = size
        self._samples: dict[int, bool] = {}
        """Whether each sequence holds samples, by its id: decided for the first part."""
        self._doubtful = len(sizes_of(batch, outer=True) or ()) > 1
        """Whether the whole batch may have another size."""
        # A DataLoader's default collating leaves no samples that hold tensors. If there are some, a custom
        # collate_fn made the batch, and every sequence that may hold samples does.
        self._of_samples = any(self._only_samples(each, outer=each is batch) for each in _sequences(batch))

    def part(self, value: Any, part: slice, *, outer: bool = False) -> Any:
        """Return a part of a value."""
        if has_rows(value):
            return value[part] if value.shape[0] == self._size else value
        if isinstance(value, Mapping):
            return _like(value, {name: self.part(entry, part) for name, entry in value.items()})
        if not isinstance(value, tuple | list):
            return value
        if id(value) not in self._samples:
            self._samples[id(value)] = self._is_samples(value, outer=outer)
        if self._samples[id(value)]:
            return value[part]
        parts = [self.part(entry, part) for entry in value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)

    def _only_samples(self, value: Sequence[Any], *, outer: bool) -> bool:
        layout = SequenceLayout.of(value, outer=outer)
        if not layout.samples or len(value) != self._size:
            return False
        nested = any(has_rows(entry) or isinstance(entry, Mapping | tuple | list) for entry in value)
        return nested and not (layout.columns and self._size in (common_sizes(value) or ()))

    def _is_samples(self, value: Sequence[Any], *, outer: bool) -> bool:
        """Return whether a sequence holds samples.

        Raises:
            UsageError: it may just as well hold columns.
        """
        layout, as_many = SequenceLayout.of(value, outer=outer), len(value) == self._size
        if not layout.samples:
            # Numbers in a tuple: one per sample, or the size of images.
            return as_many and not layout.columns and self._of_samples
        if not layout.columns or self._size not in (common_sizes(value) or ()):
            return as_many
        if as_many and self._of_samples and not outer:
            return True
        if (as_many or self._doubtful) and (
            self._of_samples or looks_like_samples(value, alike=as_many and not outer)
        ):
            raise UsageError(
                f"Cannot split a batch of {self._size} samples: it contains a {type(value).__name__} of "
                f"{len(value)} entries, which is ambiguous. The entries could be {len(value)} samples, or "
                f"{len(value)} columns of {self._size} samples each. {_ADVICE}"
            )
        return False


def _sequences(value: Any) -> Iterator[Sequence[Any]]:
    if isinstance(value, Mapping):
        for entry in value.values():
            yield from _sequences(entry)
    elif isinstance(value, tuple | list):
        yield value
        for entry in value:
            yield from _sequences(entry)


def _like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of a value's class; a copy keeps extra attributes, such as a default factory."""
    if type(value) is dict:
        return parts
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        copied.update(parts)
        return copied
    return type(value)(parts)  # type: ignore[call-arg]
