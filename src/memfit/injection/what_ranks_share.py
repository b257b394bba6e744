"""Random numbers and batches that every rank of a script for one process must have alike.

The ranks exchange a seed and, now and then, a few numbers of each batch through the launcher's store. That
needs no process group, which the script may still join itself.
"""

import json
import math
import zlib
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous
from torch.utils._pytree import tree_leaves

from memfit.random_state import seed_generators
from memfit.strategies.mechanisms.independent_samples import is_checked_again

_CLOSE = 1e-2
"""How far two ranks' numbers may be apart, relative to their norm: GPUs may round differently."""


class WhatRanksShare:
    """Compares what every rank must have alike."""

    def __init__(self) -> None:
        self._store, self._rank, self._ranks = next(iter(rendezvous("env://")))
        self._asked: dict[str, int] = {}

    def seed(self, *, own: bool = False) -> None:
        """Have all ranks draw the random numbers of the first from now on, or each rank its own."""
        name = f"memfit/seed/{own}"
        if self._rank == 0:
            self._store.set(name, str(torch.initial_seed()))
        seed_generators(int(self._store.get(name)) + own * self._rank)

    def difference(self, name: str, value: Any) -> str:
        """Return which rank has something else than the first; empty if none has, or if that is not asked.

        Args:
            name: of what it is.
            value: of this rank; what it has beside tensors is not compared.
        """
        number = self._asked[name] = self._asked.get(name, 0) + 1
        if not is_checked_again(number):
            return ""
        prefix = f"memfit/{name}/{number}"
        self._store.set(f"{prefix}/{self._rank}", json.dumps(_fingerprint(value)))
        own, *others = (json.loads(self._store.get(f"{prefix}/{rank}")) for rank in range(self._ranks))
        for rank, other in enumerate(others, 1):
            if not _are_close(own, other):
                return f"rank {rank} has another value of {name} than rank 0."
        return ""


def _fingerprint(value: Any) -> list[Any]:
    """Return a few numbers of each tensor in a value, computed on the CPU: no memory of the GPU is used."""
    found: list[Any] = []
    for each in tree_leaves(value):
        if not isinstance(each, torch.Tensor) or each.is_nested or each.layout != torch.strided:
            continue
        content = each.detach().cpu().contiguous()
        if content.is_floating_point():
            numbers = content.double().flatten()
            waves = torch.cos(torch.arange(len(numbers), dtype=torch.float64, device="cpu"))
            found.append([[*each.shape], float(numbers @ waves), float(numbers.norm())])
        else:
            found.append([[*each.shape], zlib.crc32(content.numpy().tobytes())])
    return found


def _are_close(one: list[Any], other: list[Any]) -> bool:
    """Return whether two fingerprints are of the same numbers, but for rounding.

    >>> _are_close([[[2], 1.0, 2.0]], [[[2], 1.001, 2.0]]), _are_close([[[2], 7]], [[[2], 8]])
    (True, False)
    """
    if [each[0] for each in one] != [each[0] for each in other]:
        return False
    return all(
        a[1] == b[1] if len(a) != _OF_FLOATS else abs(a[1] - b[1]) <= _CLOSE * a[2] or math.isnan(a[1])
        for a, b in zip(one, other, strict=True)
    )


_OF_FLOATS = 3
"""Entries of the fingerprint of a floating-point tensor: its shape, a projection and the norm."""
