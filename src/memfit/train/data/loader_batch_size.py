"""A loader's batch size, and whether it agrees with the settings of accumulation."""

from collections.abc import Sized
from typing import Any

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation


def batch_size_of(loader: Any) -> int | None:
    """Return a loader's ``batch_size``; None if it has no such attribute.

    >>> from torch.utils.data import DataLoader
    >>> batch_size_of(DataLoader(range(8), batch_size=4)), batch_size_of([])
    (4, None)
    """
    given = getattr(loader, "batch_size", None)
    return given if isinstance(given, int) else None


def batches_in(loader: Any) -> int | None:
    """Return the number of a loader's batches; None if it does not know."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except TypeError:  # a DataLoader of an IterableDataset has a length that raises
        return None


def expect_batches_of(settings: Accumulation, loader: Any) -> None:
    """Check the loader's batch size, if both it and the settings have one.

    Args:
        settings: the settings of accumulation.
        loader: the loader that the script passes to the engine.

    Raises:
        UsageError: the sizes differ.
    """
    name = "micro_batch_size" if settings.gathers else "global_batch_size"
    given, expected = batch_size_of(loader), getattr(settings, name)
    if None in (given, expected) or given == expected:
        return
    why = (
        "batches_per_update takes each of the loader's batches as one micro-batch. To divide the loader's "
        "batches, set parts_per_batch."
        if settings.gathers
        else "The engine divides the loader's batches. To make one update from several of them, set "
        "batches_per_update."
    )
    raise UsageError(f"The loader's batch_size is {given}, but {name}={expected}. They must be equal. {why}")
