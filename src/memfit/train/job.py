"""What is trained: a model, its optimizer and its loss."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Loss = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """The parts of a training, so that one function of a user's can return them.

    >>> job = Job(nn.Linear(4, 1), torch.optim.AdamW, lambda model, batch: model(batch).square().mean())
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    """Any of PyTorch's, or alike; or what makes one from parameters."""
    loss: Loss | None = None
    """``loss(model, batch)`` returns the mean over a batch, or its sum and what that is to be divided by:
    tokens, samples."""
    scheduler: Any = None
    """Of the learning rate: one of PyTorch's, or alike; it moves when the optimizer does. Or what makes one
    from the optimizer."""
    max_grad_norm: float | None = None
    """Gradients of a window are clipped to it, once."""
