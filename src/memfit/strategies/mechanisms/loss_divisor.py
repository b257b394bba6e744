"""By what the loss of a slice of a batch is divided, so that the losses of slices make that of the batch.

    mean over what counts     loss of the batch = sum(loss_i * divisor_i) / sum(divisor_i)
    sum                       loss of the batch = sum(loss_i)

The loss's own graph says which it is: the node of a mean has the number of elements, that of a cross-entropy
the weight of the targets that count, that of a quotient its divisor.
"""

import torch

from memfit.errors import UsageError

_MEAN, _SUM = 1, 2
"""PyTorch's numbers of reductions."""
_PASSING = ("ToCopy", "View", "Squeeze", "Clone", "Alias", "Neg", "Mul")
"""Nodes whose result is in proportion to what they are passed."""


def loss_divisor(loss: torch.Tensor) -> torch.Tensor | float | None:
    """Return by what a loss is divided: a number of elements, or the weight of those that count.

    Args:
        loss: of no dimensions, with its graph.

    Returns:
        None for a sum.

    Raises:
        UsageError: the graph does not say.

    >>> x = torch.ones(3, 2, requires_grad=True)
    >>> loss_divisor(x.mean() * 2), loss_divisor(x.sum()), loss_divisor(x.square().sum() / torch.tensor(5.0))
    (6, None, tensor(5.))
    """
    node, divisor = loss.grad_fn, None
    while node is not None:
        name = node.name().removesuffix("0").removesuffix("1").removesuffix("Backward")
        if name == "Sum":
            return divisor
        if name == "Mean":
            return int(node._saved_self_sym_numel)  # type: ignore[attr-defined]
        reduction = getattr(node, "_saved_reduction", None)
        if reduction == _MEAN:
            weight: torch.Tensor | None = getattr(node, "_saved_total_weight", None)
            return node._saved_self.numel() if weight is None else weight  # type: ignore[attr-defined]
        if reduction == _SUM:
            return divisor
        ahead = [each for each, _ in node.next_functions if each is not None]
        if len(ahead) != 1 or not (name == "Div" or name.startswith(_PASSING)):
            break
        if name == "Div":
            divisor = node._saved_other  # type: ignore[attr-defined]
        node = ahead[0]
    last = "nothing" if node is None else node.name()
    raise UsageError(
        f"batch_slices: the model returns its loss, and memfit does not see whether it is a mean or a sum "
        f"over samples: it ends in {last}. Return the outputs, and compute the loss in the training loop."
    )
