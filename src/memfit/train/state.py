"""Saving and resuming: where random numbers stand, and files that are whole or not there."""

import ctypes
import fcntl
import os
import pickle
import random
import sys
import warnings
from pathlib import Path
from typing import IO, Any

import torch

from memfit.errors import FileFormatError, UsageError
from memfit.train.generators import with_arrays, without_arrays


def random_state() -> dict[str, Any]:
    """Return where every generator stands that training draws from: Python's, NumPy's, PyTorch's."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = _numpy_state()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


_TWISTER = 624 * 4 + 4
"""Bytes of ``mt19937_state``: 624 words and a position (numpy/random/src/mt19937/mt19937.h)."""
_told: list[Any] = [b"", {}]


def _numpy_state() -> dict[str, Any]:
    """Return where NumPy's global generator stands.

    NumPy takes 40 microseconds to tell, each step of a small model as long as ten operations of it. As long
    as its words have not moved, what it told last still holds; unless it kept back a second Gaussian number,
    which can be drawn without moving them.
    """
    import numpy as np

    generator = np.random.mtrand.get_bit_generator()
    words = b""
    if isinstance(generator, np.random.MT19937):
        words = ctypes.string_at(generator.ctypes.state_address, _TWISTER)
        if words == _told[0]:
            told: dict[str, Any] = _told[1]
            return told
    state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 - the global one
    state = without_arrays(state)
    _told[:] = (b"", {}) if state["has_gauss"] else (words, state)
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put every generator where ``random_state`` found it."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(with_arrays(state["numpy"]))  # noqa: NPY002 - the global one
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state to a file, whole or not at all: a torn file is never under that name.

    It is written beside it, under a name that a run that was killed there finds again, and takes its place
    when it is on the disk.

    Raises:
        UsageError: another process is writing it.
    """
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("ab") as file:
        if not _lock(file, partial):
            raise UsageError(f"Another process is saving its run to {path}: give each a file.")
        try:
            file.truncate(0)
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _lock(file: IO[bytes], path: Path) -> bool:
    """Have a file to oneself; False if another process has it, or has just put it elsewhere."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


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
