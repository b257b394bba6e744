"""A warning for batch normalization, whose statistics of micro-batches are not those of the full batch."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memfit.user_frame import warn_user


def warn_of_batch_norms(model: nn.Module, parts: str, *, because: str = "") -> None:
    """Warn about batch norms in training mode: their results depend on how a batch is divided.

    Args:
        model: the model to search.
        parts: what the layers compute their statistics over, for example ``each micro-batch of a window``.
        because: a sentence to put first.
    """
    modules = model.named_modules()
    names = [name for name, module in modules if isinstance(module, _BatchNorm) and module.training]
    if names:
        warn_user(
            f"{because}BatchNorm layers such as {names[0]} compute their statistics separately over {parts}, "
            "not over the full batch. Results therefore differ from training on full batches. To avoid "
            "this, use GroupNorm or LayerNorm, or freeze the statistics (module.eval()).",
        )
