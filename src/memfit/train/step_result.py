"""The result of one optimizer step."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of a window.

    Reading ``loss`` or ``grad_norm`` waits for the device; nothing before does.
    """

    updated: bool
    """Whether the optimizer stepped; with loss scaling (fp16) it does not if a gradient is not finite."""
    found_inf: bool
    """Whether a gradient was not finite; checked with loss scaling only."""
    loss_scale: float | None
    """The scale of the window's losses; None without scaling."""
    micro_step: int
    """Micro-batches so far, this window's included."""
    optimizer_step: int
    """Updates so far."""
    retried: int
    """How often the window was retried in smaller parts because memory ran out."""
    loss_tensor: torch.Tensor
    """Weighted mean of the window's losses, on the device."""
    grad_norm_tensor: torch.Tensor | None
    """Norm of all gradients before clipping, on the device."""

    @property
    def loss(self) -> float:
        """Weighted mean of the window's losses."""
        return self.loss_tensor.item()

    @property
    def grad_norm(self) -> float | None:
        """Norm of all gradients before clipping; None if they are not clipped."""
        return None if self.grad_norm_tensor is None else self.grad_norm_tensor.item()
