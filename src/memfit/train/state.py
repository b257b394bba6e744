"""Saving and resuming: where random numbers stand, and files that are whole or not there."""

import os
import pickle
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch

from memfit.errors import FileFormatError


def random_state() -> dict[str, Any]:
    """Return where every generator stands that training draws from: Python's, NumPy's, PyTorch's."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, keys.tolist(), *rest)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put every generator where ``random_state`` found it."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002 - the global one that others draw from
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state to a file, whole or not at all: a torn file is never under that name."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load(path: Path) -> dict[str, Any]:
    """Read what ``save`` wrote: tensors and plain values only.

    Raises:
        FileFormatError: it is something else, or damaged.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange pickles, which are refused below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError, KeyError) as error:
        raise FileFormatError(
            f"Cannot resume from {path}: it is no state of a training run ({error})."
        ) from None
    if not isinstance(state, dict) or "version" not in state:
        raise FileFormatError(
            f"Cannot resume from {path}: it holds something else than a training run's state."
        )
    return state
