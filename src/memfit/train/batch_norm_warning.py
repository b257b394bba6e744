"""A warning for batch normalization, whose statistics of micro-batches are not those of the full batch."""

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def warn_of_batch_norms(model: nn.Module, when: str, stacklevel: int) -> None:
    """Warn about batch norms in training mode: their results depend on how a batch is divided.

    Args:
        model: the model to search.
        when: which micro-batches, or since when: the end of "over single micro-batches ...".
        stacklevel: from here to the user's line.
    """
    modules = model.named_modules()
    names = [name for name, module in modules if isinstance(module, _BatchNorm) and module.training]
    if names:
        warnings.warn(
            f"{len(names)} BatchNorm layers ({names[0]}, ...) compute their statistics over "
            f"single micro-batches {when}, not over the full batch, so accumulation gives other "
            "results than training on full batches. To avoid this, use GroupNorm or LayerNorm, "
            "freeze the statistics (module.eval()), or use SyncBatchNorm on several GPUs.",
            stacklevel=stacklevel,
        )
