"""Write a file whole or not at all, and check early that it can be written."""

import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from memfit.errors import UsageError


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file beside its final place and move it there when it is complete and on the disk.

    Args:
        path: where the file goes; a file that is there is replaced.
        write: writes the content to the open file it is given.

    Raises:
        UsageError: the file cannot be written there. Nothing is left behind, whatever goes wrong.
    """
    # Replacing works on any name: /dev/null would become an ordinary file.
    if path.exists() and not path.is_file():
        raise UsageError(f"Cannot write {path}: it is not an ordinary file. Name a file to write to.")
    path = path.resolve()  # through a link, which stays one
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _cannot_write(path, error) from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(descriptor)
        beside.replace(path)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from None
        raise


def check_output(path: Path) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold.

    Raises:
        UsageError: its folder does not exist or is not writable, or the path is a folder.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"Cannot write {path}: its folder does not exist.")
    if path.is_dir():
        raise UsageError(f"Cannot write {path}: it is a folder.")
    if not path.exists() and not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"Cannot write {path}: its folder is not writable.")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; what is not an ordinary file (``/dev/stdout``) is written to.

    Raises:
        UsageError: it cannot be written there.
    """
    if not path.exists() or path.is_file():
        write_atomically(path, lambda file: file.write(content))
        return
    try:
        path.write_bytes(content)
    except OSError as error:
        raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"Cannot write {path}: {error.strerror}. Name a file in a folder that you can write to."
    )
