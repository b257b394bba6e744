"""Split a batch into micro-batches.

tensors, arrays     along their first dimension, if that is the batch's size
dicts               entry by entry
tuples, lists       columns entry by entry, samples in slices: ``columns_or_samples`` decides which
anything else       goes unchanged to every micro-batch
"""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memfit.errors import AmbiguousBatchError, UsageError
from memfit.strategies.mechanisms.columns_or_samples import (
    ListLayout,
    Path,
    Role,
    Roles,
    common_batch_sizes,
    has_batch_dimension,
    looks_like_samples,
    possible_batch_sizes,
    sample_counts_of_batch_values,
)
from memfit.strategies.mechanisms.inspect_tensors import tensors_in_object
from memfit.user_lines import warn_user

ENGINE_ADVICE = (
    "Pass two functions to memfit.Engine: size=lambda batch: ..., which returns the "
    "number of samples, and split=lambda batch, sizes: [...], which returns parts of "
    "those sizes."
)


_OBSERVED = 2
"""Batches that are learned from if none is split."""


class BatchSplitter:
    """Splits the batches of one loader, and remembers what each of their parts was.

    A batch may not show whether a list holds samples or columns, or whether a square mask has a row per
    sample; an earlier one may have.

    Args:
        size: the user's function for the number of samples of a batch.
        split: the user's function for the parts of a batch, with their sizes.
        advice: what to do about a batch that cannot be split, as a sentence.

    >>> splitter = BatchSplitter()
    >>> batch = {"x": torch.zeros(5, 2), "y": torch.zeros(5), "epoch": 3}
    >>> splitter.size(batch), [part["x"].shape[0] for part in splitter.split(batch, [3, 2])]
    (5, [3, 2])
    """

    def __init__(
        self,
        size: Callable[[Any], int] | None = None,
        split: Callable[[Any, list[int]], list[Any]] | None = None,
        advice: str = ENGINE_ADVICE,
    ) -> None:
        self._advice = advice
        self._size_of, self._parts_of = size, split
        self._roles: dict[Path, Role] = {}
        self._observed = 0

    def size(self, batch: object) -> int:
        """Return the number of samples of a batch.

        Raises:
            AmbiguousBatchError: a list in it may hold as many samples, or columns of another number of them.
            UsageError: nothing in the batch has samples, or its parts disagree.
        """
        if self._size_of is not None:
            return self._size_of(batch)
        sizes = possible_batch_sizes(batch, self._roles, outer=True) or set()
        if len(sizes) == 1:
            return sizes.pop()
        found = set(sample_counts_of_batch_values(batch, outer=True))
        if len(found) == 1 and found <= sizes:
            (size,) = found
            collated = isinstance(batch, tuple | list) and all(
                map(has_batch_dimension, batch)
            )  # tensors: columns
            if not collated:
                _Splitter(batch, [size], self._roles, self._advice).learn(batch)
            return size
        parts = (
            f"its parts have the lengths {', '.join(map(str, sorted(found)))}"
            if found
            else "it contains no tensors, arrays or lists of samples"
        )
        raise UsageError(f"Cannot determine the number of samples in a batch: {parts}. {self._advice}")

    def split(self, batch: Any, sizes: list[int]) -> list[Any]:
        """Split a batch into parts of the given sizes.

        Args:
            batch: tensors, and tuples, lists and dicts of them.
            sizes: samples of each part; together those of the batch.

        Raises:
            AmbiguousBatchError: a list may hold samples or columns, or a square mask a row per sample.
        """
        if self._parts_of is not None:
            return self._parts_of(batch, sizes)
        if len(sizes) == 1:
            return [batch]
        if isinstance(batch, torch.Tensor):
            return list(torch.split(batch, sizes))
        splitter = _Splitter(batch, sizes, self._roles, self._advice)
        splitter.learn(batch)
        parts = splitter.parts(batch)
        self._roles = splitter.roles
        return parts

    def observe(self, batch: Any) -> None:
        """Learn from the first batches that are not split, as far as they show what their parts are."""
        if self._observed == _OBSERVED or self._parts_of is not None:
            return
        self._observed += 1
        try:
            splitter = _Splitter(batch, [self.size(batch)], self._roles, self._advice)
            splitter.learn(batch)
        except UsageError:
            return
        self._roles = splitter.roles


def even_micro_batch_sizes(samples: int, parts: int) -> list[int]:
    """Return sizes that differ by at most one, the larger first; no part is empty.

    >>> even_micro_batch_sizes(10, 4), even_micro_batch_sizes(2, 4)
    ([3, 3, 2, 2], [1, 1])
    """
    parts = min(parts, samples)
    small, more = divmod(samples, parts)
    return [small + 1] * more + [small] * (parts - more)


def warn_of_batch_norms(model: nn.Module, parts: str, *, because: str = "") -> None:
    """Warn about batch norms in training mode: their results depend on how a batch is divided.

    Args:
        model: the model to search.
        parts: what the layers compute their statistics over, for example ``each micro-batch of a window``.
        because: a sentence to put first.
    """
    modules = model.named_modules()
    names = [name for name, module in modules if isinstance(module, _BatchNorm) and module.training]
    if names:
        warn_user(
            f"{because}BatchNorm layers such as {names[0]} compute their statistics separately over {parts}, "
            "not over the full batch. Results therefore differ from training on full batches. To avoid "
            "this, use GroupNorm or LayerNorm, or freeze the statistics (module.eval()).",
        )


class _Splitter:
    """Splits one batch into parts of known sizes."""

    def __init__(self, batch: object, sizes: list[int], roles: Roles, advice: str) -> None:
        self._advice = advice
        self._batch, self._sizes, self._size = batch, sizes, sum(sizes)
        self.roles = dict(roles)
        """Completed by what this batch shows."""

    @cached_property
    def _doubtful(self) -> bool:
        """Whether the whole batch may have another size."""
        return len(possible_batch_sizes(self._batch, self.roles, outer=True) or ()) > 1

    @cached_property
    def _of_samples(self) -> bool:
        """Whether a sequence certainly holds samples.

        A DataLoader's default collating leaves no samples that hold tensors. If there are some, a custom
        collate_fn made the batch, and every sequence that may hold samples does.
        """
        return any(self._only_samples(each, path) for path, each in _sequences(self._batch))

    @cached_property
    def _has_squares(self) -> bool:
        """Whether the samples may be sequences of as many entries as there are samples."""
        squares = (
            each for each in tensors_in_object(self._batch) if each.shape[:2] == (self._size, self._size)
        )
        return self._size > 1 and len(list(squares)) > 1

    def learn(self, value: Any, path: Path = ()) -> None:
        """Find out what a value and what it contains are, unless earlier batches have shown that."""
        if has_batch_dimension(value) or isinstance(value, tuple | list):
            if path not in self.roles:
                self.roles[path] = self._role(value, path)
            if self.roles[path] == "columns":
                for index, entry in enumerate(value):
                    self.learn(entry, (*path, index))
        elif isinstance(value, Mapping):  # last: it takes longest to ask
            for name, entry in value.items():
                self.learn(entry, (*path, name))

    def parts(self, value: Any, path: Path = ()) -> list[Any]:
        """Return the parts of a value that ``learn`` has seen."""
        rows = range(len(self._sizes))
        is_sequence = has_batch_dimension(value) or isinstance(value, tuple | list)
        if not is_sequence and isinstance(value, Mapping):
            columns = {name: self.parts(entry, (*path, name)) for name, entry in value.items()}
            return [_like(value, {name: parts[row] for name, parts in columns.items()}) for row in rows]
        role = self.roles.get(path, "shared")
        if role == "shared" or not is_sequence:
            return [value] * len(self._sizes)
        if role == "columns":
            entries = [self.parts(entry, (*path, index)) for index, entry in enumerate(value)]
            made = ([parts[row] for parts in entries] for row in rows)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return [type(value)(*part) for part in made]
            return [type(value)(part) for part in made]
        if len(value) != self._size:
            raise UsageError(
                f"Cannot split a batch of {self._size} samples: {_described(path)} has {len(value)} entries, "
                f"but in earlier batches it had one per sample. {self._advice}"
            )
        if type(value) is torch.Tensor:
            return list(value.split_with_sizes(self._sizes))
        # A subclass may give its rows what belongs to them: names, boxes.
        ends = list(accumulate(self._sizes))
        return [value[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]

    def _role(self, value: Any, path: Path) -> Role:
        """Return what a value holds."""
        if has_batch_dimension(value):
            if value.shape[0] != self._size:
                return "shared"
            if self._has_squares and value.shape == (self._size, self._size) and not _is_of_integers(value):
                raise AmbiguousBatchError(
                    f"Cannot split a batch of {self._size} samples: {_described(path)} is ambiguous. Its "
                    f"{self._size} rows could be of one sample each, or it could be a mask between the "
                    f"{self._size} entries of a sequence, for all samples. {self._advice}"
                )
            return "rows"
        if self._is_samples(value, path):
            return "samples"
        layout = ListLayout.of(value, outer=not path)
        return "columns" if layout.columns else "shared"

    def _only_samples(self, value: Sequence[Any], path: Path) -> bool:
        layout = ListLayout.of(value, outer=not path)
        if not layout.samples or len(value) != self._size:
            return False
        nested = any(
            has_batch_dimension(entry) or isinstance(entry, Mapping | tuple | list) for entry in value
        )
        return nested and not (layout.columns and self._size in self._column_sizes(value, path))

    def _column_sizes(self, value: Sequence[Any], path: Path) -> set[int]:
        return common_batch_sizes(enumerate(value), self.roles, path) or set()

    def _is_samples(self, value: Sequence[Any], path: Path) -> bool:
        """Return whether a sequence holds samples."""
        outer = not path
        layout, as_many = ListLayout.of(value, outer=outer), len(value) == self._size
        if not layout.samples:
            # Numbers in a tuple: one per sample, or the size of images.
            return as_many and not layout.columns and self._of_samples
        if not layout.columns or self._size not in self._column_sizes(value, path):
            return as_many
        if as_many and self._of_samples and not outer:
            return True
        if (as_many or self._doubtful) and (
            self._of_samples or looks_like_samples(value, alike=as_many and not outer)
        ):
            raise AmbiguousBatchError(
                f"The number of samples in a batch is ambiguous: {_described(path)} is a "
                f"{type(value).__name__} of {len(value)} entries, which could be {len(value)} samples, or "
                f"{len(value)} columns of {self._size} samples each. {self._advice}"
            )
        return False


def _described(path: Path) -> str:
    """Return a part's place in a batch, as it is indexed.

    >>> _described(("x", 0))
    "batch['x'][0]"
    """
    return "batch" + "".join(f"[{each!r}]" for each in path)


def _is_of_integers(value: Any) -> bool:
    """Return whether a square of values can be tokens, which no mask between them is."""
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)
    return value.dtype.kind in "iu"


def _sequences(value: Any, path: Path = ()) -> Iterator[tuple[Path, Sequence[Any]]]:
    if isinstance(value, Mapping):
        for name, entry in value.items():
            yield from _sequences(entry, (*path, name))
    elif isinstance(value, tuple | list):
        yield path, value
        for index, entry in enumerate(value):
            yield from _sequences(entry, (*path, index))


def _like(value: Mapping[Any, Any], parts: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of a value's class; a copy keeps extra attributes, such as a default factory."""
    if type(value) is dict:
        return parts
    if isinstance(value, MutableMapping):
        copied = copy.copy(value)
        copied.update(parts)
        return copied
    return type(value)(parts)  # type: ignore[call-arg]
