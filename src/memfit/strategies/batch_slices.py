"""Batch slices: a model's batch in parts, inside its call; the training loop stays as it is.

    plain     batch of 32 ── model ── output of 32 ── loss
    slices    batch of 32 ── model: 8, 8, 8, 8 ── output of 32 ── loss

All slices but the last ``kept`` run forward again in the backward: what their layers save exists for one
slice at a time. It costs (count - kept) / count of a forward. The loss, clipping, gradient scaling, logging
and the update are the loop's own, and see the whole batch.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from memfit.errors import UsageError
from memfit.strategies.mechanisms.sliced_forward import SlicedForward
from memfit.strategies.mechanisms.wrap_forward import forward_wrappers, wrap_forward
from memfit.strategies.setting_checks import check_setting_types
from memfit.strategies.sharding import module_inside_ddp


@dataclass(frozen=True, slots=True)
class BatchSlices:
    """Settings of batch slices.

    Gradients equal those of the whole batch up to the order of sums, for any loss, if the model computes each
    sample by itself: in the first calls and each hundredth, some samples run together and in two halves
    before, and a model that combines them is refused. Random numbers are drawn slice by slice: others than
    for the whole batch.

    Raises:
        UsageError: a number is out of range.

    Example:
        >>> import torch
        >>> model = nn.Linear(8, 4)
        >>> revert = BatchSlices(4).apply(model)
        >>> model(torch.randn(32, 8)).shape
        torch.Size([32, 4])
        >>> revert()
    """

    count: int = 2
    """Slices of a batch; a batch of fewer samples has fewer."""
    kept: int = 1
    """The last so many of them keep what they save for the backward, and do not run again."""
    dim: int = 0
    """The dimension of the model's inputs along which samples lie: 1 if sequences come first."""

    def __post_init__(self) -> None:
        """Check."""
        check_setting_types(self, "batch_slices")
        if self.count < 1:
            raise UsageError(f"batch_slices: 'count' must be an integer of at least 1, not {self.count!r}.")
        if not 1 <= self.kept <= self.count:
            raise UsageError(
                f"batch_slices: 'kept' must be from 1 to count={self.count}, not {self.kept!r}: the last "
                "slice is kept, as its backward comes right after its forward."
            )
        if self.dim < 0:
            raise UsageError(f"batch_slices: 'dim' must be 0 or more, not {self.dim!r}.")

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Divide the batches of a model, and return the undo.

        Raises:
            UsageError: the model's batches are divided already.
        """
        inside = module_inside_ddp(model)
        if any(isinstance(each, SlicedForward) for each in forward_wrappers(inside)):
            raise UsageError("batch_slices: the model's batches are divided already.")
        return wrap_forward(inside, self, SlicedForward)
