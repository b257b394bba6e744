"""Batch normalization sees what it is given: micro-batches are not the batch."""

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def warn_of_batch_norms(model: nn.Module, when: str, stacklevel: int) -> None:
    """Warn of layers whose result depends on how a batch is divided, if there are any in training mode.

    Args:
        model: is looked through.
        when: since when they see micro-batches.
        stacklevel: from here to the user's line.
    """
    modules = model.named_modules()
    names = [name for name, module in modules if isinstance(module, _BatchNorm) and module.training]
    if names:
        warnings.warn(
            f"{len(names)} batch norms ({names[0]}, ...) see micro-batches {when}, so that accumulation does "
            "not equal the whole batch. Alternatives: GroupNorm or LayerNorm, frozen statistics "
            "(module.eval()), or SyncBatchNorm on several GPUs.",
            stacklevel=stacklevel,
        )
