"""Find the random number generators that a loader holds: ``DataLoader(shuffle=True, generator=...)``.

loader ── sampler ── batch_sampler ── dataset        generators that are attributes of these, each once

Generators in worker processes and in other objects are not found.
"""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

_PARTS = ("sampler", "batch_sampler", "dataset")


def generators_of(loader: Any) -> list[Any]:
    """Return PyTorch's, NumPy's and Python's generators in a loader and its parts, in a fixed order."""
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if "numpy" in sys.modules:
        import numpy as np

        kinds = (*kinds, np.random.Generator, np.random.RandomState)
    found = {
        id(value): value
        for part in _parts(loader)
        for _, value in sorted(vars(part).items())
        if isinstance(value, kinds) and not isinstance(value, random.SystemRandom)
    }
    return list(found.values())


def _parts(loader: Any) -> Iterator[Any]:
    waiting, seen = [loader], set[int]()
    while waiting:
        part = waiting.pop(0)
        if id(part) not in seen and hasattr(part, "__dict__"):
            seen.add(id(part))
            yield part
            waiting += [vars(part)[name] for name in _PARTS if name in vars(part)]
