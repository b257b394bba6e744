"""Files of saved runs: written atomically, and checked when they are read."""

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
from memfit.input_files import check_ordinary_file_or_folder


def save_state_file(state: dict[str, Any], path: Path) -> None:
    """Write a state to a file atomically: a partial file never has that name.

    It is written to a file beside it, and renamed once it is on the disk. The other file has a fixed name, so
    that a run that is killed while saving leaves at most one behind, which its next save reuses.

    NumPy's scalars become Python's; values that ``load_state_file`` would not read are refused.
    """
    state = _plain(state, "")
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("ab") as file:
        if not _lock(file, partial):
            raise UsageError(f"Another process is saving its run to {path}. Use one file per run.")
        try:
            file.truncate(0)
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Write the names of a folder's files to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_PLAIN = (str, int, float, bool, complex, bytes, type(None), torch.dtype, torch.device, torch.Size)
_DICTS = (dict, OrderedDict, Counter)  # Counter: MultiStepLR's milestones


def _plain(value: Any, where: str) -> Any:
    """Return a copy of a state as plain values, with the same tensors."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return value
    if type(value) in _DICTS:
        return type(value)(
            {_plain(name, where): _plain(entry, f"{where}[{name!r}]") for name, entry in value.items()}
        )
    if type(value) in (list, tuple, set):
        return type(value)(_plain(entry, f"{where}[{index}]") for index, entry in enumerate(value))
    if type(value) in torch.serialization.get_safe_globals():
        return value
    raise UsageError(
        f"Cannot save the run: state{where} is a "
        f"{type(value).__module__}.{type(value).__qualname__}, but a file can hold only "
        "tensors and plain values. Change the state_dict or get_extra_state method that "
        "returns this value."
    )


def _lock(file: IO[bytes], path: Path) -> bool:
    """Lock a file; return False if another process has locked it, or has just renamed it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        return False


UNREADABLE = (
    *(zipfile.BadZipFile, pickle.UnpicklingError),
    *(RuntimeError, ValueError, EOFError, OSError, KeyError, TypeError, AttributeError, IndexError),
)


def load_state_file(path: Path) -> dict[str, Any]:
    """Read a file that ``save_state_file`` wrote: tensors and plain values only.

    Raises:
        FileFormatError: the file is something else, or damaged.
        FileNotFoundError: there is no such file.
    """
    check_ordinary_file_or_folder(path)
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # torch.save writes checksums, which torch.load does not check
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} does not match")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unusual pickles, which are refused below
            state = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise FileFormatError(
            f"Cannot resume from {path}: it is not the state of a training run, or is damaged ({error})."
        ) from None
    if not isinstance(state, dict) or "version" not in state:
        raise FileFormatError(f"Cannot resume from {path}: it does not hold the state of a training run.")
    return state
