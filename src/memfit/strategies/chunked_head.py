"""The head in chunks: a model's last layer and its loss are computed slice by slice.

    plain       hidden ── head ──> logits ── loss             positions * classes
    chunked     hidden[0:n] ── head ──> logits ── loss        positions * classes / chunks,
                hidden[n:2n] ── head ──> ...                  one slice after another

With a vocabulary of 50,000 or 128,000 classes, logits and their gradient are most of a step's peak. The
gradients of a slice are computed right after its loss, in the forward, and multiplied by the gradient of the
loss in the backward: no operation runs twice. In float16 they are computed in the backward, from the scaled
loss, and the head's forward runs twice.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from memfit.errors import UsageError
from memfit.strategies.mechanisms.sliced_loss import SlicedLoss
from memfit.strategies.setting_checks import check_dtype_name
from memfit.strategies.sharding import sharding_of_model

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True)
class ChunkedHead:
    """A model's head and the loss on its result, computed in slices.

    It replaces two lines of a forward or of a loss: ``logits = head(hidden)`` and ``loss =
    cross_entropy(logits, targets)``. It is no module: the head stays the model's own, with its names in the
    ``state_dict``. Create it in each forward, or once as an attribute of the model.

    Gradients equal those of the plain head up to the order of sums: within 1e-6 of the largest in float32,
    1e-12 in float64. With one chunk they are equal bit for bit. A head that draws random numbers (dropout)
    draws others than the plain one.

    Raises:
        UsageError: a setting is invalid, or the head cannot be computed in slices: it is itself wrapped in
            DistributedDataParallel or sharded by ``fully_shard``, or has batch normalization.

    Example:
        >>> head = nn.Linear(8, 1000)
        >>> hidden, targets = torch.randn(2, 5, 8, requires_grad=True), torch.randint(1000, (2, 5))
        >>> loss = ChunkedHead(head, chunks=4)(hidden, targets)
        >>> torch.allclose(loss, functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten()))
        True
        >>> loss.backward()
        >>> hidden.grad.shape, head.weight.grad.shape
        (torch.Size([2, 5, 8]), torch.Size([1000, 8]))
    """

    head: nn.Module
    """Maps each position's features to its logits, independently of other positions: a linear layer, or a
    norm and a linear layer. It is called with tensors of shape (positions of a slice, features)."""
    chunks: int = 8
    """Slices. Their lengths differ by at most one position."""
    gradient_dtype: str | None = None
    """The dtype in which gradients of the head's parameters are summed over slices. By default float32 for
    parameters of lower precision."""

    def __post_init__(self) -> None:
        """Check."""
        if not isinstance(self.head, nn.Module):
            raise UsageError(
                f"ChunkedHead needs a module as its head, not a {type(self.head).__name__}: it computes the "
                "gradients of the module's parameters."
            )
        if not isinstance(self.chunks, int) or isinstance(self.chunks, bool) or self.chunks < 1:
            raise UsageError(f"ChunkedHead: 'chunks' must be an integer of at least 1, not {self.chunks!r}.")
        check_dtype_name(self.gradient_dtype, "ChunkedHead: gradient_dtype")

    @_disable_dynamo
    def __call__(
        self,
        hidden: torch.Tensor,
        targets: torch.Tensor,
        *,
        weight: torch.Tensor | None = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        label_smoothing: float = 0.0,
        token_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the cross-entropy of the head's logits, as ``torch.nn.functional.cross_entropy`` does.

        Logits of lower precision are cast to float32 for the loss, slice by slice.

        Args:
            hidden: ``(..., features)``, what the plain head would be called with.
            targets: ``(...)``, the class of each position; or ``(..., classes)``, probabilities.
            weight: ``(classes)``, a factor for each class.
            ignore_index: the class of positions that do not count.
            reduction: ``mean`` divides by the sum of the weights of the positions that count.
            label_smoothing: from 0 to 1.
            token_weights: ``(...)``, a factor for the loss of each position, and for its part in the divisor.

        Returns:
            A tensor of no dimensions.

        Raises:
            UsageError: shapes do not fit, or the head cannot be computed in slices.
        """
        if reduction not in ("mean", "sum"):
            raise UsageError(
                f"ChunkedHead: reduction must be 'mean' or 'sum', not {reduction!r}. The gradients are "
                "computed before the backward, so the loss must be one number. Use token_weights to weigh "
                "positions."
            )
        positions, classes = hidden.shape[:-1], targets.is_floating_point()
        if (targets.shape[:-1] if classes else targets.shape) != positions:
            raise UsageError(
                f"ChunkedHead: targets of shape {tuple(targets.shape)} do not fit hidden states of shape "
                f"{tuple(hidden.shape)}: each of the positions, {tuple(positions)}, needs a target. Shift "
                "before the call: hidden[:, :-1] and targets[:, 1:]."
            )
        if token_weights is not None and token_weights.shape != positions:
            raise UsageError(
                f"ChunkedHead: token_weights of shape {tuple(token_weights.shape)} must have the shape of "
                f"the positions, {tuple(positions)}."
            )
        flat = [targets.flatten(0, -2) if classes and targets.dim() > 1 else targets.reshape(-1)]
        if token_weights is not None:
            flat.append(token_weights.reshape(-1))
        divisor = None
        if reduction == "mean":
            divisor = _divisor(targets, weight, ignore_index, token_weights)
        loss = partial(
            _cross_entropy,
            weight=weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            divisor=divisor,
        )
        total, _ = self._slices(loss, divisor)(hidden.reshape(-1, hidden.shape[-1]), tuple(flat))
        return total

    @_disable_dynamo
    def with_loss(
        self,
        loss: Callable[[torch.Tensor, Any], Any],
        inputs: torch.Tensor,
        targets: torch.Tensor | tuple[torch.Tensor, ...],
    ) -> torch.Tensor:
        """Return a loss of your own on the head's result, in slices along the first dimension.

        The head may be any part of the network that treats entries of the first dimension independently:
        with inputs of shape (batch, length, features) it may contain attention.

        Args:
            loss: is called with the head's result for a slice and the slice of the targets. It returns the
                sum of the losses, or a pair of the sum and its divisor, which must not require a gradient.
            inputs: ``(n, ...)``.
            targets: ``(n, ...)``, or a tuple of such tensors.

        Returns:
            The sum; for pairs, the sum of the sums by the sum of the divisors.

        Raises:
            UsageError: the loss returns something else, or the head cannot be computed in slices.

        Example:
            >>> head = nn.Linear(8, 100)
            >>> def squared(result, targets):
            ...     return (result - targets).square().sum(), result.numel()
            >>> x, y = torch.randn(6, 8), torch.randn(6, 100)
            >>> loss = ChunkedHead(head, chunks=3).with_loss(squared, x, y)
            >>> torch.allclose(loss, functional.mse_loss(head(x), y))
            True
        """
        if not isinstance(targets, tuple):
            only: torch.Tensor = self.with_loss(lambda result, own: loss(result, own[0]), inputs, (targets,))
            return only
        for each in targets:
            if each.shape[:1] != inputs.shape[:1]:
                raise UsageError(
                    f"ChunkedHead: targets of shape {tuple(each.shape)} do not fit inputs of shape "
                    f"{tuple(inputs.shape)}: their first dimensions must be equal."
                )
        total, divisor = self._slices(loss)(inputs, targets)
        return total if divisor is None else total / divisor

    def _slices(
        self, loss: Callable[[torch.Tensor, Any], Any], divisor: torch.Tensor | None = None
    ) -> SlicedLoss:
        _expect_sliceable(self.head)
        dtype = None if self.gradient_dtype is None else getattr(torch, self.gradient_dtype)
        return SlicedLoss(self.head, loss, self.chunks, dtype, divisor)


def _cross_entropy(
    logits: torch.Tensor,
    targets: tuple[torch.Tensor, ...],
    *,
    weight: torch.Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    divisor: torch.Tensor | None,
) -> torch.Tensor:
    """Return the part of a slice in the loss."""
    wanted, *factors = targets
    losses = functional.cross_entropy(
        logits.float() if logits.dtype.itemsize < torch.float32.itemsize else logits,
        wanted,
        weight,
        ignore_index=ignore_index,
        reduction="none" if factors else "sum",
        label_smoothing=label_smoothing,
    )
    total = (losses * factors[0]).sum() if factors else losses
    return total if divisor is None else total / divisor


def _divisor(
    targets: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    token_weights: torch.Tensor | None,
) -> torch.Tensor:
    """Return the sum of the weights of the positions that count: their number, if they have no weights."""
    if targets.is_floating_point():
        positions = targets[..., 0]
        return (torch.ones_like(positions) if token_weights is None else token_weights).sum()
    counts = targets != ignore_index
    if weight is not None:
        counts = counts * weight[targets.where(counts, 0)]
    return (counts if token_weights is None else counts * token_weights).sum()


def _expect_sliceable(head: nn.Module) -> None:
    """Refuse heads whose gradients or statistics would be wrong."""
    tensors = sys.modules.get("torch.distributed.tensor")
    name = type(head).__name__
    if sharding_of_model(head) is not None or (
        tensors is not None and any(isinstance(each, tensors.DTensor) for each in head.parameters())
    ):
        raise UsageError(
            f"ChunkedHead: the head ({name}) is wrapped or sharded itself: its parameters would be gathered, "
            "and its gradients reduced, once in each slice. Shard or wrap the whole model, not the head, and "
            "call ChunkedHead in the model's forward."
        )
    norms = [
        part
        for part, each in head.named_modules()
        if isinstance(each, _BatchNorm) and (each.training or not each.track_running_stats)
    ]
    if norms:
        raise UsageError(
            f"ChunkedHead: the head ({name}) has batch normalization ({norms[0] or name}), which would be "
            "over the positions of a slice instead of all. Leave it out of the head, or call it in "
            "evaluation mode."
        )
