"""What one optimizer step did."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What became of a window.

    ``loss`` and ``grad_norm`` wait for the device when they are asked for, and not before.
    """

    updated: bool
    """Whether the optimizer stepped; with loss scaling (fp16), not where a gradient was not finite."""
    found_inf: bool
    """Whether one was not; looked for with loss scaling only."""
    loss_scale: float | None
    """That the window was scaled with; None without scaling."""
    micro_step: int
    """Micro-batches so far, this window's included."""
    optimizer_step: int
    """Updates so far."""
    retried: int
    """Times that the window was begun again in smaller parts, for want of memory."""
    loss_tensor: torch.Tensor
    """Weighted mean over the window."""
    grad_norm_tensor: torch.Tensor | None

    @property
    def loss(self) -> float:
        """Weighted mean of the window's losses."""
        return self.loss_tensor.item()

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients before clipping; None if they are not clipped."""
        return None if self.grad_norm_tensor is None else self.grad_norm_tensor.item()
