"""Samplers at the beginning of an epoch: each draws a new order, or divides the data among ranks."""

from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from memfit.train.ranks.job_ranks import OneRank
from memfit.user_frame import warn_user

_DIGEST_BYTES = 6  # exact in a float64
_ENDS = 16
"""Entries at each end of a sequence, and numbers of a row."""
_MOST = 1000
"""Values that a dataset shows."""
_DIVIDES = -1.0
"""In place of a digest, of a loader that divides the data, or of which memfit cannot tell."""


def set_sampler_epoch(loader: Iterable[Any], epoch: int, ranks: OneRank) -> None:
    """Set the epoch of a loader's sampler, and warn if every rank may train on the same data.

    All ranks call this at the same time.

    Args:
        loader: as ``fit`` received it; only a ``DataLoader`` has samplers.
        epoch: that begins, counted from 0.
        ranks: that train together.
    """
    samplers: list[Any] = []
    if isinstance(loader, DataLoader):
        samplers = [loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)]
    settable = {id(each): each for each in samplers if callable(getattr(each, "set_epoch", None))}
    for sampler in settable.values():
        sampler.set_epoch(epoch)
    if ranks.size == 1:
        return
    whole = samplers and not settable and isinstance(samplers[0], RandomSampler | SequentialSampler)
    own = _digest(loader.dataset) if whole and isinstance(loader, DataLoader) else _DIVIDES
    most, least = ranks.agree("engine.fit", own, -own)
    if own != _DIVIDES and most == -least:
        warn_user(
            f"The loaders of the {ranks.size} ranks seem to have the same data: memfit found no difference "
            f"between their datasets, and a {type(samplers[0]).__name__} does not divide them. Pass "
            "DataLoader(..., sampler=torch.utils.data.DistributedSampler(dataset)). If each rank's dataset "
            "is its own share, nothing is wrong."
        )


def _digest(dataset: Any) -> float:
    """Return a number that differs where a dataset shows its share of the data without loading a sample."""
    shown = repr((len(dataset), list(_shown(dataset))))
    return float(int.from_bytes(blake2b(shown.encode(), digest_size=_DIGEST_BYTES).digest()))


def _shown(dataset: Any) -> Iterator[Any]:
    """Yield what a dataset's attributes hold: files, indices, arrays, or what those of its parts hold."""
    values = deque([dataset])
    for _ in range(_MOST):
        if not values:
            return
        value = values.popleft()
        yield type(value).__qualname__
        if isinstance(value, int | float | range | None):
            yield value
        elif isinstance(value, str | bytes | list | tuple):
            yield len(value)
            ends = value[:_ENDS], value[-_ENDS:]
            if isinstance(value, str | bytes):
                yield ends
            else:
                values.extend(chain(*ends))
        elif isinstance(value, dict):
            values.extend(islice(value.values(), _ENDS))
        elif isinstance(value, torch.Tensor | np.ndarray):
            yield value.shape
            if value.ndim and str(getattr(value, "device", "cpu")) == "cpu":  # numpy has it since 2.0
                yield [rows.flatten()[:_ENDS].tolist() for rows in (value[:1], value[-1:])]
        else:
            values.extend(getattr(value, "__dict__", {}).values())
