"""Open the files that a user names as input: ordinary files only, up to a stated size.

A device or a pipe may never end, and a file may be larger than this machine's memory: both are refused before
anything is read.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from memfit.errors import FileFormatError

_KINDS = {
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def check_ordinary_file_or_folder(path: Path) -> None:
    """Check that a path leads to a file or a folder; opening anything else may wait, or never end.

    Raises:
        FileFormatError: it is a device, a pipe or a socket.
        OSError: there is nothing there.
    """
    kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    if kind is not None:
        raise FileFormatError(f"Cannot read {path}: it is {kind}. Name an ordinary file.")


def open_input_file(path: Path, most: int | None, remedy: str = "") -> BinaryIO:
    """Open an ordinary file, or a link to one, for reading.

    Args:
        path: the file.
        most: the size in bytes up to which it is opened; None for any size.
        remedy: what to do about a larger file: a sentence.
    """
    try:
        check_ordinary_file_or_folder(path)
        file = path.open("rb")
    except OSError as error:
        raise FileFormatError(f"Cannot read {path}: {error.strerror or error}.") from None
    size = os.fstat(file.fileno()).st_size
    if most is not None and size > most:
        file.close()
        raise _too_large(path, most, f"{size:,}", remedy)
    return file


def read_input_file(path: Path, most: int, remedy: str = "") -> bytes:
    """Read an ordinary file, or a link to one."""
    with open_input_file(path, most, remedy) as file:
        try:
            content = file.read(most + 1)
        except OSError as error:
            raise FileFormatError(f"Cannot read {path}: {error.strerror or error}.") from None
    if len(content) > most:  # it grew, or is a file of /proc, whose size reads 0
        raise _too_large(path, most, f"more than {most:,}", remedy)
    return content


def _too_large(path: Path, most: int, size: str, remedy: str) -> FileFormatError:
    limit = f"it has {size} bytes, and memfit reads such files only up to {most:,} bytes."
    return FileFormatError(f"Cannot read {path}: {limit} {remedy}".rstrip())
