"""The job of an engine: a model, its optimizer and its loss."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

Interval = Literal["update", "epoch"]
Loss = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What an engine trains, so that one function of a user's can return all of it.

    >>> job = Job(nn.Linear(4, 1), torch.optim.AdamW, lambda model, batch: model(batch).square().mean())
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    """A PyTorch optimizer, or a function that creates one from parameters."""
    loss: Loss | None = None
    """``loss(model, batch)`` returns the mean over a batch, or a pair: the sum, and its divisor in tokens or
    samples."""
    scheduler: Any = None
    """A PyTorch learning-rate scheduler, or a function that creates one from the optimizer."""
    scheduler_interval: Interval | None = None
    """When the scheduler steps: after each ``"update"`` of the parameters, or after each ``"epoch"``. Each
    scheduler needs one of the two, or a metric: ``StepLR(optimizer, 30)`` means 30 of these."""
    scheduler_metric: str | None = None
    """The name of the validated metric that ``ReduceLROnPlateau`` watches, after each epoch."""
    max_grad_norm: float | None = None
    """The norm to which a window's gradients are clipped, once: those of the optimizer's parameters."""
    batch: Callable[[int], Any] | None = None
    """``batch(size)`` returns a batch of so many samples, on any device, for the commands that run a job:
    ``memfit plan job.py:make_job``. Random values do. An engine does not call it."""
