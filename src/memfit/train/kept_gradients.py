"""Gradients that stay allocated from one window to the next, and are zeroed in place.

A DistributedDataParallel keeps gradients in the buckets that it reduces, which stay allocated anyway. A
gradient that is dropped would be allocated anew beside them by the next backward.
"""

from collections.abc import Iterable
from functools import partial
from weakref import ref

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


class KeptGradients:
    """The gradients of some parameters, and which of them a backward has added to.

    Args:
        parameters: their gradients stay where they are.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._used: set[torch.Tensor] = set()
        mark = partial(_mark, ref(self))  # parameters do not hold this object, which is freed with the engine
        self._hooks = {
            each: each.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
            for each in parameters
        }

    def clear(self) -> None:
        """Zero the gradients that were used, or drop those that cannot be kept, because they are sparse."""
        kept = []
        for parameter in self._used:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = None
            elif parameter.grad is not None:
                kept.append(parameter.grad)
        if kept:
            torch._foreach_zero_(kept)
        self._used.clear()

    def mark(self, parameter: torch.Tensor) -> None:
        """Count a parameter's gradient as used."""
        self._used.add(parameter)

    def is_used(self, parameter: nn.Parameter) -> bool:
        """Return whether a backward has added to a parameter's gradient, or it is not kept here."""
        return parameter in self._used or parameter not in self._hooks

    def hooks(self) -> list[RemovableHandle]:
        """Return the parameters' hooks, for removal."""
        return list(self._hooks.values())


def _mark(kept: "ref[KeptGradients]", parameter: torch.Tensor) -> None:
    owner = kept()
    if owner is not None:
        owner.mark(parameter)
