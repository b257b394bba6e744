"""A window: the micro-batches that make one update, and what their gradients are divided by.

micro-batch     0      1      2        each backward divides its loss; the end of the window mends
weight         w0     w1     w2        what could not be known before

divisor of i  = total / wi             where the total is known, or taken to be w0 * planned:
                                       exactly the number of micro-batches where weights are equal
at the end      gradients * (total / sum of weights), left out where that is 1
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from memfit.errors import UsageError


@dataclass(slots=True)
class Window:
    """The accounts of one window."""

    planned: int
    """Micro-batches that it is to have."""
    total: float | None = None
    """What weights are divided by, from the first micro-batch on."""
    done: int = 0
    """Micro-batches so far."""
    weight: float = 0.0
    """Of those."""
    weighted: bool = False
    """Whether weights were given."""
    by_hand: bool = False
    """Whether nobody knows its micro-batches before: it is closed when it is full, or by ``flush``."""
    whole: bool = False
    """Whether it is a whole batch's: ``step`` holds the parts that are still to come."""
    interrupted: bool = False
    """Whether a backward, or the update, was begun and not ended: gradients are not what they are to be."""
    loss: torch.Tensor | None = None
    """Sum of the losses by their divisors, detached."""

    def add(self, loss: torch.Tensor, weight: float | None) -> torch.Tensor | None:
        """Count a micro-batch's mean loss; return what to go backward from, None if it weighs nothing.

        The window is ``interrupted`` until that is done.

        Raises:
            UsageError: weights are given for some only, or are none; or there are more than planned.
        """
        if self.done == self.planned:
            raise UsageError(f"The window has {self.planned} micro-batches, and each goes backward once.")
        if self.done and self.weighted != (weight is not None):
            raise UsageError(
                "A window's losses have weights or have none: give engine.backward all, or none."
            )
        self.weighted = weight is not None
        share = 1.0 if weight is None else float(weight)
        if not 0 <= share < float("inf"):
            raise UsageError(f"A micro-batch of weight {share}: weights are numbers of tokens or samples.")
        self.interrupted = True
        if self.total is None and share:
            self.total = share * self.planned
        self.done += 1
        self.weight += share
        if not share or self.total is None:
            return None
        divisor = self.total / share
        root = loss if divisor == 1.0 else loss / divisor
        self.loss = _plus(self.loss, root.detach() if _is_full(loss) else loss.detach().float() / divisor)
        return root

    def make_room(self, weight: float | None) -> float:
        """Count in larger units, if a micro-batch weighs more than was planned for all.

        So no loss is multiplied by more than 1, for which float16 may have no room.

        Returns:
            What gradients are to be multiplied by; until that is done the window is ``interrupted``.
        """
        if weight is None or self.total is None or not self.total < weight < float("inf"):
            return 1.0
        self.interrupted = True
        factor, self.total = self.total / weight, weight
        if self.loss is not None:
            self.loss = self.loss * factor
        return factor

    @property
    def correction(self) -> float:
        """What the gradients are to be multiplied by at the end."""
        return 1.0 if self.total is None else self.total / self.weight

    def mean_loss(self) -> torch.Tensor:
        """Return the weighted mean of the losses.

        Raises:
            UsageError: there are none.
        """
        if self.loss is None:
            raise UsageError(
                "The window weighs nothing: it has no micro-batch, or none with tokens or samples."
            )
        return self.loss if self.correction == 1.0 else self.loss * self.correction

    def state_dict(self) -> dict[str, Any]:
        """Return the accounts as plain values and a tensor."""
        return asdict(self)


def _is_full(loss: torch.Tensor) -> bool:
    """Whether losses add up as they are: a sum of bf16 losses stands still."""
    return loss.dtype.itemsize >= torch.float32.itemsize


def _plus(total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
    # The first is copied: it may be where a graph puts the next loss, too.
    return part.clone() if total is None else total.add_(part)
