"""Draw batches from a loader to learn their sizes.

A pass may have a million batches, and host memory holds only a few of them. memfit keeps:

    batches of the pass   a b c d e f g h i j k l m n o p ...
    largest               those with the most bytes
    spread                every 1st, then every 2nd, 4th, ... batch

Drawing leaves the random generators as they were. The script then gets a few of these batches first
(``replaced_batches.py``).
"""

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from memfit.random_state import generator_states, get_random_state, set_generator_states, set_random_state
from memfit.records import BatchSize, LoaderScan

_DEPTH = 6
_WITHOUT = str | bytes | int | float | torch.nn.Module | type
"""Types that hold no tensors of a batch."""
_LARGEST = 4
_SPREAD = 8
_SHAPES = 1 << 12
"""How many batch sizes keep the shapes of their tensors."""
_APART = 0.1
"""Share of the distance from the median to the largest batch that a batch between the two keeps from both."""

Shapes = tuple[tuple[int, ...], ...]


def _arrays_in(value: object, depth: int = _DEPTH) -> Iterator[Any]:
    """Yield the tensors and NumPy arrays of a batch: of containers, dataclasses and other objects."""
    if isinstance(value, torch.Tensor | np.ndarray):
        yield value
    elif depth and not isinstance(value, _WITHOUT):
        for item in _items(value):
            yield from _arrays_in(item, depth - 1)


def _items(value: object) -> Iterable[object]:
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if hasattr(value, "__dict__"):
        return vars(value).values()
    if dataclasses.is_dataclass(value):  # with slots
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    return ()


@dataclasses.dataclass(frozen=True, slots=True)
class DrawnBatch:
    """A batch that memfit has drawn from the script's loader."""

    batch: Any
    bytes: int
    shapes: Shapes
    """Of its tensors, in the order in which they are found in it."""


def measure_drawn_batch(batch: Any) -> DrawnBatch:
    """Return a batch with its size."""
    arrays = list(_arrays_in(batch))
    return DrawnBatch(batch, sum(each.nbytes for each in arrays), tuple(tuple(each.shape) for each in arrays))


class SampledBatches:
    """Counts the batches of a pass by size, and keeps a few of them."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """Bytes of each batch, in order."""
        self._shapes: dict[int, Shapes] = {}  # of the first batch of each size
        self._largest: list[DrawnBatch] = []  # the largest first
        self._spread: list[DrawnBatch] = []
        self._stride = 1

    def add(self, batch: DrawnBatch) -> None:
        """Count a batch, and keep it if it is large, or one of the few that are kept in any case."""
        if len(self.sizes) % self._stride == 0:
            self._spread.append(batch)
            if len(self._spread) > _SPREAD:
                self._spread, self._stride = self._spread[::2], 2 * self._stride
        self.sizes.append(batch.bytes)
        if len(self._shapes) < _SHAPES:
            self._shapes.setdefault(batch.bytes, batch.shapes)
        if all(batch.bytes != each.bytes for each in self._largest):
            ordered = sorted((*self._largest, batch), key=lambda each: -each.bytes)
            self._largest = ordered[:_LARGEST]

    @property
    def median(self) -> int:
        """Bytes of the median batch; of an even number, the larger of the two in the middle."""
        return sorted(self.sizes)[len(self.sizes) // 2]

    def chosen(self) -> tuple[DrawnBatch, ...]:
        """Return the largest batch, one near the median, and one between the two if there is any.

        Returns:
            Nothing if no batch is larger than the median.
        """
        largest, median = self._largest[0], self.median
        if largest.bytes <= median:
            return ()
        others = [each for each in (*self._largest, *self._spread) if each.bytes < largest.bytes]
        near = min(others, key=lambda each: abs(each.bytes - median), default=None)
        if near is None:
            return (largest,)
        apart = _APART * (largest.bytes - near.bytes)
        middle = (largest.bytes + near.bytes) / 2
        between = [each for each in others if near.bytes + apart < each.bytes < largest.bytes - apart]
        return (largest, near, *sorted(between, key=lambda each: abs(each.bytes - middle))[:1])

    def describe(self, chosen: tuple[DrawnBatch, ...]) -> tuple[BatchSize, ...]:
        """Return the sizes of the largest and the median batch, then those of ``chosen``.

        The shape is that of the largest tensor whose shape is not the same in the first two.
        """
        largest = self._largest[0]
        median = DrawnBatch(None, self.median, self._shapes.get(self.median, ()))
        tensor = _that_differs(largest.shapes, median.shapes)
        shapes = ((each, each.shapes) for each in (largest, median, *chosen))
        return tuple(
            BatchSize(each.bytes, found[tensor] if tensor < len(found) else ()) for each, found in shapes
        )


def _that_differs(largest: Shapes, median: Shapes) -> int:
    """Return the index of the largest tensor whose shape differs; of all tensors if none does."""
    numbers = range(len(largest))
    same_kind = len(largest) == len(median)
    differ = [number for number in numbers if same_kind and largest[number] != median[number]]
    return max(differ or numbers, key=lambda number: np.prod(largest[number]), default=0)


def only_dimension_that_differs(one: BatchSize, other: BatchSize) -> int | None:
    """Return the dimension in which two shapes differ; None if they differ in none, or in several."""
    if len(one.shape) != len(other.shape):
        return None
    differ = [at for at, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
    return differ[0] if len(differ) == 1 else None


_GENERATORS = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
_HOLDERS = ("sampler", "batch_sampler", "dataset")


def scan_loader(
    loader: Any, begin: Callable[[], Any], seconds: float, *, most: int | None, where: str, of: int | None
) -> tuple[LoaderScan, tuple[DrawnBatch, ...]] | None:
    """Draw the batches of a pass, and choose a few of them.

    Args:
        loader: a ``DataLoader``.
        begin: returns the iterator of a new pass.
        seconds: after which no more batches are drawn.
        most: batches, after which the pass has ended in any case; None if the iterator ends by itself.
        where: ``file:line`` that created the loader.
        of: batches of the pass; None if it is not known.

    Returns:
        What was seen, and the batches to give to the script; None if fewer than two batches came.
    """
    with _preserved_generators(loader):
        sample, ended = _draw(begin, seconds, most)
    if len(sample.sizes) <= (ended != "gpu"):
        return None
    chosen = sample.chosen()
    largest, median, *served = sample.describe(chosen)
    scan = LoaderScan(
        where=where,
        seen=len(sample.sizes),
        of=len(sample.sizes) if ended == "pass" else of,
        ended=ended,
        largest=largest,
        median=median,
        served=tuple(served),
        dimension=only_dimension_that_differs(largest, median),
    )
    return scan, chosen


def _draw(begin: Callable[[], Any], seconds: float, most: int | None) -> tuple[SampledBatches, str]:
    """Return the batches of a pass, and why it ended, as in ``LoaderScan``."""
    until = time.monotonic() + seconds
    sample = SampledBatches()
    iterator = begin()
    try:
        while len(sample.sizes) != most:
            try:
                batch = next(iterator)
            except StopIteration:
                return sample, "pass"
            except Exception as error:  # noqa: BLE001 - the script's data set may raise anything
                return sample, f"{type(error).__name__}: {error}"
            sample.add(measure_drawn_batch(batch))
            if any(isinstance(each, torch.Tensor) and each.is_cuda for each in _arrays_in(batch)):
                return sample, "gpu"  # memory that the script would not hold
            if time.monotonic() > until:
                return sample, "time"
        return sample, "pass"
    finally:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


@contextmanager
def _preserved_generators(loader: Any) -> Iterator[None]:
    """Set back the global random generators, and those of a loader, its samplers and its data set."""
    holders = [loader, *(getattr(loader, name, None) for name in _HOLDERS)]
    holders.append(getattr(loader.batch_sampler, "sampler", None))
    values = [value for each in holders if hasattr(each, "__dict__") for value in vars(each).values()]
    own = list({id(value): value for value in values if isinstance(value, _GENERATORS)}.values())
    everywhere, states = get_random_state(), generator_states(own)
    try:
        yield
    finally:
        set_random_state(everywhere)
        set_generator_states(own, states)
