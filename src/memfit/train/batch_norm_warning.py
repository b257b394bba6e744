"""A warning for batch normalization, whose statistics of micro-batches are not those of the full batch."""

import warnings

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def warn_of_batch_norms(model: nn.Module, when: str, stacklevel: int) -> None:
    """Warn about batch norms in training mode: their results depend on how a batch is divided.

    Args:
        model: the model to search.
        when: the end of "see micro-batches ...": since when.
        stacklevel: from here to the user's line.
    """
    modules = model.named_modules()
    names = [name for name, module in modules if isinstance(module, _BatchNorm) and module.training]
    if names:
        warnings.warn(
            f"{len(names)} batch norms ({names[0]}, ...) see micro-batches {when}, so that accumulation does "
            "not equal training on the full batch. Alternatives: GroupNorm or LayerNorm, frozen statistics "
            "(module.eval()), or SyncBatchNorm on several GPUs.",
            stacklevel=stacklevel,
        )
