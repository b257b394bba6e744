"""A window: the micro-batches of one update, the divisors of their losses, and its result.

micro-batch     0      1      2        each backward divides its loss; the end of the window corrects
weight         w0     w1     w2        for what was not known before

divisor of i  = total / wi             the total, if not known, is assumed to be w0 * planned:
                                       exactly the number of micro-batches if weights are equal
at the end      gradients * (total / sum of weights), left out if that is 1
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from memfit.errors import UsageError


@dataclass(slots=True)
class AccumulationWindow:
    """The counts, weights and loss of one window."""

    planned: int
    """Micro-batches that fill it."""
    total: float | None = None
    """The divisor of the weights, from the first micro-batch on."""
    done: int = 0
    """Micro-batches so far."""
    weight: float = 0.0
    """The sum of their weights."""
    weighted: bool = False
    """Whether weights were given: by the loss, or to ``Engine.backward``."""
    by_hand: bool = False
    """Whether the caller's own loop feeds it: it closes when it is full, or by ``flush``."""
    holds_parts: bool = False
    """Whether the engine holds parts of a batch that are still to be processed: they cannot be saved."""
    interrupted: bool = False
    """Whether a backward or the update began and did not complete: gradients are incomplete."""
    loss: torch.Tensor | None = None
    """Sum of the losses divided by their divisors, detached."""

    def add(
        self, loss: torch.Tensor, weight: float | None, *, share: float = 1.0, completes: bool = True
    ) -> torch.Tensor | None:
        """Count a micro-batch's mean loss; return the root of its backward, None if its weight is 0.

        The window is ``interrupted`` until that backward completes.

        Args:
            loss: the mean over the micro-batch.
            weight: as for ``Engine.backward``.
            share: what the micro-batch weighs if no weight is given: its samples, if batches are divided.
            completes: whether this completes one of the planned micro-batches, which may be split further.
        """
        if self.done == self.planned:
            raise UsageError(
                f"engine.backward was called more than {self.planned} times in this accumulation "
                f"window, which has {self.planned} micro-batches. Call it exactly once for each "
                "micro-batch."
            )
        if self.done and self.weighted != (weight is not None):
            raise UsageError(
                "In this accumulation window some micro-batches have a weight and others do not. Pass "
                "a weight in every call of engine.backward of a window, or in none; a loss must return a sum "
                "and its divisor for every micro-batch, or for none."
            )
        self.weighted = weight is not None
        share = share if weight is None else float(weight)
        if not 0 <= share < float("inf"):
            raise UsageError(
                f"'weight' must be finite and at least 0, not {share}. Pass the micro-batch's number of "
                "tokens or samples."
            )
        self.interrupted = True
        if self.total is None and share:
            self.total = share * self.planned
        self.done += completes
        self.weight += share
        if not share or self.total is None:
            return None
        divisor = self.total / share
        root = loss if divisor == 1.0 else loss / divisor
        self.loss = _plus(self.loss, root.detach() if _is_full(loss) else loss.detach().float() / divisor)
        return root

    def make_room(self, weight: float) -> float:
        """Raise the total, if a micro-batch weighs more than was planned for all.

        No loss is then multiplied by more than 1, which could overflow float16.

        Returns:
            The factor for the gradients so far; the window is ``interrupted`` until they are multiplied.
        """
        if self.total is None or not self.total < weight < float("inf"):
            return 1.0
        self.interrupted = True
        factor, self.total = self.total / weight, weight
        if self.loss is not None:
            self.loss = self.loss * factor
        return factor

    @property
    def correction(self) -> float:
        """The factor for the gradients at the window's end."""
        return 1.0 if self.total is None else self.total / self.weight

    def mean_loss(self) -> torch.Tensor:
        """Return the weighted mean of the losses."""
        if self.loss is None:
            why = "all of its micro-batches have weight 0" if self.done else "it has no micro-batches"
            raise UsageError(f"This accumulation window has no mean loss, because {why}.")
        return self.loss if self.correction == 1.0 else self.loss * self.correction

    def state_dict(self) -> dict[str, Any]:
        """Return the window as plain values and a tensor."""
        return asdict(self)


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


def _is_full(loss: torch.Tensor) -> bool:
    """Return whether losses can be summed in their own dtype: a sum of bf16 losses stops growing."""
    return loss.dtype.itemsize >= torch.float32.itemsize


def _plus(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    # The first is copied: a graph may write the next loss to the same tensor.
    return part.clone() if total is None else total.add_(part)
