"""Samplers at the beginning of an epoch: each draws a new order, or divides the data among ranks."""

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from memfit.train.ranks import OneRank
from memfit.user_frame import warn_user


def begin_epoch(loader: Iterable[Any], epoch: int, ranks: OneRank) -> None:
    """Set the epoch of a loader's sampler, and warn if every rank would train on the same data.

    Args:
        loader: as ``fit`` received it; only a ``DataLoader`` has samplers.
        epoch: that begins, counted from 0.
        ranks: that train together.
    """
    if not isinstance(loader, DataLoader):
        return
    samplers: list[Any] = [loader.sampler, loader.batch_sampler]
    samplers.append(getattr(loader.batch_sampler, "sampler", None))
    settable = {id(each): each for each in samplers if callable(getattr(each, "set_epoch", None))}
    for sampler in settable.values():
        sampler.set_epoch(epoch)
    if ranks.size > 1 and not settable and isinstance(loader.sampler, RandomSampler | SequentialSampler):
        warn_user(
            f"Each of the {ranks.size} ranks trains on all data of this loader, because its "
            f"{type(loader.sampler).__name__} does not divide them. Pass DataLoader(..., "
            "sampler=torch.utils.data.DistributedSampler(dataset)), or give each rank a loader of its share."
        )
