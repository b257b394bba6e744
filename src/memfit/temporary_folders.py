"""Temporary folders that later processes remove if the process that made them was killed.

A process holds a lock on a file in each of its folders. The kernel releases the lock when the process ends,
however that ends, so a folder whose lock is free has been left behind. A process ID would not do: containers
that share a temporary folder count processes separately.
"""

import fcntl
import functools
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

PREFIX = "memfit-"
_MARK = ".in-use"


class TemporaryFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder of this process; as a context manager, its path."""

    def __init__(self) -> None:
        """Make the folder, and remove those that killed processes have left."""
        remove_abandoned_folders()
        super().__init__(prefix=PREFIX)
        self._lock = keep_folder_from_removal(Path(self.name))

    def cleanup(self) -> None:
        """Remove the folder."""
        super().cleanup()
        os.close(self._lock)


def keep_folder_from_removal(folder: Path) -> int:
    """Keep a folder from being removed while the returned descriptor is open; make it if need be."""
    mark = folder / _MARK
    while True:
        with suppress(FileNotFoundError):  # it was being removed
            folder.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(mark, os.O_CREAT | os.O_NOFOLLOW, 0o600)
            with suppress(OSError):  # a file system without locks: then nothing is found to be left behind
                fcntl.flock(descriptor, fcntl.LOCK_SH)
            try:
                if os.path.samestat(os.fstat(descriptor), mark.lstat()):
                    return descriptor
            except FileNotFoundError:
                os.close(descriptor)


@functools.cache
def remove_abandoned_folders() -> None:
    """Remove the folders of this user's processes that were killed; once in a process."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with suppress(OSError):  # it is not a folder, is in use or not this user's, or has gone
                _remove_if_free(path)


def _remove_if_free(path: Path) -> None:
    """Remove a folder of this user's.

    Raises:
        OSError: it is a link or no folder, has no mark, or a process holds it.
    """
    folder = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(folder).st_uid != os.getuid():
            return
        mark = os.open(_MARK, os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # By the descriptor: another folder may have taken the path.
            shutil.rmtree(".", ignore_errors=True, dir_fd=folder)
            path.rmdir()
        finally:
            os.close(mark)
    finally:
        os.close(folder)
