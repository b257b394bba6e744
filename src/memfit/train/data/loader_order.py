"""The order in which ranks go through a dataset, epoch by epoch, and where another number of ranks goes on.

``DistributedSampler`` deals out one order in turn: rank r of N has samples r, r + N, r + 2N, ... So k batches
of b samples on each of N ranks are the first k * b * N samples of that order, on any number of ranks.

    order           0  1  2  3  4  5  6  7  8  ...
    2 ranks, b = 2  A  B  A  B| A  B  A  B| A  ...
    4 ranks, b = 1  A  B  C  D| A  B  C  D| A  ...
"""

from collections import deque
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain, islice
from typing import Annotated, Any, NotRequired, TypedDict

import numpy as np
import torch
from msgspec import Meta
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from memfit.errors import UsageError
from memfit.train.ranks.rank_agreement import SingleRank
from memfit.user_lines import warn_user


class SavedLoaderOrder(TypedDict):
    """How the ranks went through a dataset, as far as memfit knows."""

    ranks: Annotated[int, Meta(ge=1)]
    batch_size: NotRequired[Annotated[int, Meta(ge=1)]]
    samples: NotRequired[Annotated[int, Meta(ge=0)]]
    """Of the dataset."""
    shuffled: NotRequired[int | None]
    """The seed; None if they are in the dataset's own order."""


def loader_order_of(loader: Any, ranks: int) -> SavedLoaderOrder:
    """Return the order in which ranks read their loaders; only their number, if the loader may use another.

    >>> loader_order_of(DataLoader(range(8), batch_size=4), 1)
    {'ranks': 1, 'batch_size': 4, 'samples': 8, 'shuffled': None}
    >>> loader_order_of(DataLoader(range(8), batch_size=4, shuffle=True), 1)
    {'ranks': 1}
    """
    unknown: SavedLoaderOrder = {"ranks": ranks}
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        return unknown
    dataset: Any
    sampler: Any = loader.batch_sampler.sampler
    if type(sampler) is DistributedSampler and sampler.num_replicas == ranks:
        shuffled, dataset = sampler.seed if sampler.shuffle else None, sampler.dataset
    elif type(sampler) is SequentialSampler and ranks == 1:
        shuffled, dataset = None, sampler.data_source
    else:
        return unknown
    samples, batch_size = len(dataset), loader.batch_sampler.batch_size
    return {"ranks": ranks, "batch_size": batch_size, "samples": samples, "shuffled": shuffled}


def batches_already_read(consumed: int, there: SavedLoaderOrder, loader: Any, ranks: int) -> int:
    """Return how many batches of a loader are the samples that another number of ranks has read.

    Args:
        consumed: batches that each of those ranks has read.
        there: their order.
        loader: this rank's.
        ranks: their number now.
    """
    here = loader_order_of(loader, ranks)
    saved = f"{there['ranks']} rank{'s' * (there['ranks'] != 1)}"
    why = f"Cannot resume inside an epoch: {saved} saved the state, and this job has {ranks}. "
    remedy = "Or resume from a state saved at the end of an epoch."
    if "samples" not in here or not {"samples", "batch_size"} <= there.keys():
        raise UsageError(
            f"{why}memfit knows which samples were read only if both jobs use a DataLoader with a "
            f"DistributedSampler. {remedy}"
        )
    for name, what in (("samples", "samples in the dataset"), ("shuffled", "as the sampler's seed")):
        if here.get(name) != there.get(name):
            raise UsageError(
                f"{why}The saved run had {there.get(name)} {what}, and this one has {here.get(name)}. Use "
                f"the same dataset and the same shuffle. {remedy}"
            )
    done = consumed * there["batch_size"] * there["ranks"]
    if done >= there["samples"]:
        return len(loader)
    batches, rest = divmod(done, here["batch_size"] * ranks)
    if rest:
        whole = f"a batch_size that divides {done // ranks}" if done % ranks == 0 else "other ranks"
        raise UsageError(
            f"{why}The {done} samples read so far are no whole number of batches of {here['batch_size']} on "
            f"{ranks} rank{'s' * (ranks != 1)}. Choose {whole}. {remedy}"
        )
    return batches


_DIGEST_BYTES = 6  # exact in a float64
_ENDS = 16
"""Entries at each end of a sequence, and numbers of a row."""
_MOST = 1000
"""Values that a dataset shows."""
_DIVIDES = -1.0
"""In place of a digest, of a loader that divides the data, or of which memfit cannot tell."""


def set_sampler_epoch(loader: Iterable[Any], epoch: int, ranks: SingleRank) -> None:
    """Set the epoch of a loader's sampler, and warn if every rank may train on the same data.

    All ranks call this at the same time.
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
