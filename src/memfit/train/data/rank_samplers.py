"""Samplers at the beginning of an epoch: each draws a new order, or divides the data among ranks."""

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, Subset, TensorDataset

from memfit.train.ranks import OneRank
from memfit.user_frame import warn_user

_DIGEST_BYTES = 6  # exact in a float64
_ENDS = 16
"""Indices at each end of a subset."""
_DIVIDES = -1.0
"""In place of a digest, of a loader that divides the data, or of which memfit cannot tell."""


def begin_epoch(loader: Iterable[Any], epoch: int, ranks: OneRank) -> None:
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
    return float(int.from_bytes(blake2b(repr(_shown(dataset)).encode(), digest_size=_DIGEST_BYTES).digest()))


def _shown(dataset: Any) -> Any:
    """Return the length of a dataset, and some of its indices, or the first and last rows of its tensors."""
    if isinstance(dataset, Subset):
        ends = list(dataset.indices[:_ENDS]), list(dataset.indices[-_ENDS:])
        return len(dataset), ends, _shown(dataset.dataset)
    if isinstance(dataset, TensorDataset):
        return [(each.shape, each[:1].tolist(), each[-1:].tolist()) for each in dataset.tensors]
    return len(dataset)
