"""The one divisor of an accumulation window in a trainer's loop: what ``memfit.Engine`` computes.

    backward     loss / (total / weight)        the first micro-batch estimates the total: its weight times K
    ...
    closing      gradients times (total / weights of all micro-batches and ranks): 1 if the estimate was right

A trainer divides by K, and so a last window of fewer micro-batches counts less, and each micro-batch counts
the same however many tokens it has.
"""

from collections.abc import Iterable

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.train.accumulation_window import Window


class WindowDivisor:
    """Divides the losses of one window after the other.

    Args:
        batches_per_update: micro-batches that fill a window; the trainer may close it earlier.
    """

    def __init__(self, batches_per_update: int) -> None:
        self._planned = batches_per_update
        self._window: Window | None = None

    @property
    def done(self) -> int:
        """Micro-batches of the open window so far."""
        return 0 if self._window is None else self._window.done

    def drop(self) -> None:
        """Forget the open window: its gradients were cleared."""
        self._window = None

    def divided(
        self, loss: torch.Tensor, weight: float | None = None, *, device: torch.device | None = None
    ) -> torch.Tensor | None:
        """Return what a micro-batch's backward begins with, instead of its mean loss; None for weight 0.

        Args:
            loss: the mean over the micro-batch.
            weight: tokens or samples in that mean; for all micro-batches of a window, or for none.
            device: over which ranks communicate; by default the loss's.

        Raises:
            UsageError: the weight is invalid, or only some micro-batches have one.
        """
        weight = None if weight is None else float(weight)
        if self._window is None:
            self._window = Window(self._planned)
            if weight is not None and _ranks() > 1:
                self._window.total = _total(weight, device or loss.device) * self._planned / _ranks()
        if not weight and weight is not None and _ranks() > 1:
            raise UsageError(
                "A micro-batch has weight 0, but with several ranks each must run a backward. Leave such "
                "batches out of the data."
            )
        if self._window.done and self._window.weighted != (weight is not None):
            raise UsageError(
                "In this window some micro-batches have a weight and others do not. Give one to each, or to "
                "none."
            )
        return self._window.add(loss, weight)

    def close(self, parameters: Iterable[nn.Parameter]) -> None:
        """Correct the gradients of a window, after its last backward and before they are clipped."""
        window, self._window = self._window, None
        if window is None or window.total is None:
            return
        held = [each.grad for each in parameters if each.grad is not None]
        weight = window.weight
        if window.weighted and _ranks() > 1 and held:
            weight = _total(weight, held[0].device) / _ranks()
        if held and window.total != weight:
            torch._foreach_mul_(held, window.total / weight)


def _ranks() -> int:
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if ready else 1


def _total(weight: float, device: torch.device) -> float:
    """Return the sum of a weight over the ranks."""
    total = torch.tensor(weight, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.item()
