"""Keep what memfit computes for itself from those who watch what the script computes."""

from contextlib import AbstractContextManager
from typing import Any


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode sees operations.

    The recorder of a step notes all of them, and checkpointed regions compare or count them. memfit's own
    bookkeeping is no part of the script's step, and differs between a forward and its recomputation.
    """
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()
