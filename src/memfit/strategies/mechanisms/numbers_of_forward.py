"""The numbers that a model's forward computes, from which it may make the divisor of its loss."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.card.detect_card import is_ghost_loaded

Number = torch.Tensor | float
"""Of no dimensions; PyTorch keeps a Python number as a tensor on the CPU, too."""


class NumbersOfForward(TorchFunctionMode):
    """Notes what has no dimensions and no gradient: counts, and what the forward reads of tensors.

    >>> with NumbersOfForward() as numbers:
    ...     divisor = max(int(torch.ones(3).sum()), 1)
    >>> numbers.found
    [tensor(3.), 3]
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Number] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a function, and note its result if it is a number."""
        result = function(*args, **(kwargs or {}))
        is_number = type(result) in (int, float)
        if is_number or (isinstance(result, torch.Tensor) and not (result.dim() or result.requires_grad)):
            self.found.append(result if is_number else result.clone())  # clamp_ writes to a count
        return result


def numbers_of_forward(*, wanted: bool = True) -> AbstractContextManager[NumbersOfForward | None]:
    """Return a context that notes numbers; not on the ghost, whose tensors have no values."""
    return NumbersOfForward() if wanted and not is_ghost_loaded() else nullcontext()
