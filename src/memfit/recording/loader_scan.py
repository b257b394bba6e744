"""Draw batches from a loader to learn their sizes, and set back the random generators that this uses."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from memfit.random_state import generator_states, get_random_state, set_generator_states, set_random_state
from memfit.recording.batch_sizes import (
    BatchSample,
    DrawnBatch,
    arrays_in,
    drawn,
    only_dimension_that_differs,
)
from memfit.records import LoaderScan

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


def _draw(begin: Callable[[], Any], seconds: float, most: int | None) -> tuple[BatchSample, str]:
    """Return the batches of a pass, and why it ended, as in ``LoaderScan``."""
    until = time.monotonic() + seconds
    sample = BatchSample()
    iterator = begin()
    try:
        while len(sample.sizes) != most:
            try:
                batch = next(iterator)
            except StopIteration:
                return sample, "pass"
            except Exception as error:  # noqa: BLE001 - the script's data set may raise anything
                return sample, f"{type(error).__name__}: {error}"
            sample.add(drawn(batch))
            if any(isinstance(each, torch.Tensor) and each.is_cuda for each in arrays_in(batch)):
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
