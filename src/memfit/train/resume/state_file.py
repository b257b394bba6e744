"""Saving and resuming: where random numbers stand, and files that are whole or not there."""

import fcntl
import os
import pickle
import warnings
import zipfile
from collections import Counter, OrderedDict
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from memfit.errors import FileFormatError, UsageError
from memfit.strategies.mechanisms.global_generators import NUMPY, PYTHON


def random_state() -> dict[str, Any]:
    """Return where every generator stands that training draws from: Python's, NumPy's, PyTorch's."""
    state: dict[str, Any] = {
        "python": PYTHON.get_state(),
        "numpy": NUMPY.get_state(),
        "torch": torch.default_generator.get_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put every generator where ``random_state`` found it."""
    PYTHON.set_state(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        NUMPY.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state to a file, whole or not at all: a torn file is never under that name.

    It is written beside it, under a name that a run that was killed there finds again, and takes its place
    when it is on the disk.

    NumPy's scalars become Python's; what ``load`` would not read is refused.

    Raises:
        UsageError: another process is writing it; or there is something in it that is no plain value.
    """
    state = _plain(state, "")
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


_PLAIN = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DICTS = (dict, OrderedDict, Counter)  # the last of MultiStepLR's milestones


def _plain(value: Any, where: str) -> Any:
    """Return a copy of a state, in plain values and its own tensors.

    Raises:
        UsageError: something in it is neither.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return value
    if type(value) in _DICTS:
        return type(value)(
            {_plain(name, where): _plain(entry, f"{where}[{name!r}]") for name, entry in value.items()}
        )
    if type(value) in (list, tuple, set):
        return type(value)(_plain(entry, f"{where}[{place}]") for place, entry in enumerate(value))
    if type(value) in torch.serialization.get_safe_globals():
        return value
    raise UsageError(
        f"Cannot save the run: state{where} is a {type(value).__module__}.{type(value).__qualname__}, and a "
        "file holds tensors and plain values. Have state_dict (get_extra_state, a callback's) return those."
    )


def _lock(file: IO[bytes], path: Path) -> bool:
    """Have a file to oneself; False if another process has it, or has just put it elsewhere."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


_UNREADABLE = (
    *(zipfile.BadZipFile, pickle.UnpicklingError),
    *(RuntimeError, ValueError, EOFError, OSError, KeyError, TypeError, AttributeError, IndexError),
)


def load(path: Path) -> dict[str, Any]:
    """Read what ``save`` wrote: tensors and plain values only.

    Raises:
        FileFormatError: it is something else, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # torch.save writes checksums, and torch.load does not look at them
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} is another")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of strange pickles, which are refused below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        raise FileFormatError(
            f"Cannot resume from {path}: it is no state of a training run, or damaged ({error})."
        ) from None
    if not isinstance(state, dict) or "version" not in state:
        raise FileFormatError(
            f"Cannot resume from {path}: it holds something else than a training run's state."
        )
    return state
