"""Write files atomically, and check early that they can be written."""

import errno
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from memfit.errors import OutputError, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a temporary file in the same folder, and rename it to ``path`` once it is complete and on disk.

    Raises:
        OutputError: the file cannot be written there. No temporary file is left behind after any error.
        UsageError: the path names something other than a file.
    """
    # A rename replaces any kind of file: /dev/null would become an ordinary one.
    if path.exists() and not path.is_file():
        raise UsageError(f"Cannot write {path}: it exists but is not a regular file. Choose another path.")
    path = path.resolve()  # writes through a symbolic link, which is kept
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        # Opened in here: Ctrl-C may come at any line.
        descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(descriptor)
        beside.replace(path)
    except BaseException as error:
        with suppress(OSError):
            beside.unlink()
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from None
        raise


def check_output_path(path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold."""
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"Cannot write {path}: its folder does not exist.")
    if path.is_dir():
        raise UsageError(f"Cannot write {path}: it is a folder.")
    # write_atomically creates a file in the folder of an existing one, too.
    if (not path.exists() or path.is_file()) and not os.access(path.resolve().parent, os.W_OK | os.X_OK):
        raise UsageError(f"Cannot write {path}: its folder is not writable.")


def check_output_paths(outputs: Mapping[str, Path | None], inputs: Mapping[str, Path]) -> None:
    """Check each output as ``check_output_path`` does, and refuse one that overwrites an input or another.

    Args:
        outputs: files to write, by the option that names each; None for an option that was not given.
        inputs: files to keep, by what each is: ``the script``.

    >>> check_output_paths(
    ...     {"--html": Path("a.html"), "--csv": Path("b.csv")}, {"the trace": Path("run.memfit")}
    ... )
    """
    taken = {path.resolve(): name for name, path in inputs.items()}
    for option, path in outputs.items():
        if path is None:
            continue
        check_output_path(path)
        if path.exists() and not path.is_file():
            continue  # /dev/null holds any number of outputs
        before = taken.setdefault(path.resolve(), f"the file of {option}")
        if before != f"the file of {option}":
            raise UsageError(f"{option} {path} would overwrite {before}. Name another file.")


def write_output_file(path: Path, content: bytes) -> None:
    """Write a file atomically, or write to it directly if it is not an ordinary one (``/dev/stdout``).

    Raises:
        OutputError: the file cannot be written there.
    """
    if not path.exists() or path.is_file():
        write_atomically(path, lambda file: file.write(content))
        return
    try:
        path.write_bytes(content)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> OutputError:
    remedy = "Name a file in a folder that you can write to."
    if error.errno in _FULL:
        remedy = "Free some space, or name a file on another disk."
    return OutputError(f"Cannot write {path}: {error.strerror}. {remedy}")
