"""The user's C compiler, and the cache folder of what it compiled."""

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import platformdirs

from memfit.errors import GhostError, UnsuitableEnvironmentError

COMPILERS = ("cc", "gcc", "clang")
COMPILE_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",  # dladdr, MAP_FIXED_NOREPLACE, clock_gettime
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",  # only what is marked API is exported
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",  # prototypes are NVIDIA's; most of their arguments are not needed here
)
SHARED_C = Path(__file__).with_name("c")
"""The folder of the headers that all of memfit's C code may include."""

Signature = tuple[Any, Sequence[Any]]
"""The ctypes result type of a function, and its argument types."""

_SHOWN_LINES = 20


_SAID = "MEMFIT_CACHE_FALLBACK"
"""The environment variable that says that the user knows of the fallback; processes of scripts inherit it."""


def cache_folder(kind: str, entry: str = "") -> Path:
    """Return the cache folder of a kind of file, in ``$MEMFIT_CACHE`` or the user's cache folder.

    If that cannot be written, it is one in the temporary folder, and the first process says so.

    Args:
        kind: the folder's name.
        entry: what is looked for: a folder that has it need not be writable.
    """
    chosen = os.environ.get("MEMFIT_CACHE")
    cache = Path(chosen) if chosen else platformdirs.user_cache_path("memfit")
    if (entry and (cache / kind / entry).exists()) or _can_write(cache / kind):
        return cache / kind
    own = _own_folder(Path(tempfile.gettempdir()) / f"memfit-cache-{os.getuid()}")
    if own is None or not _can_write(own / kind):
        raise UnsuitableEnvironmentError(
            f"Cannot write to memfit's cache folder {cache}, nor to the temporary folder in its place. "
            "Set MEMFIT_CACHE to a writable folder."
        )
    if os.environ.get(_SAID) != str(own):
        os.environ[_SAID] = str(own)
        print(
            f"memfit: cannot write to the cache folder {cache}, so {own} is used. To keep the cache "
            "elsewhere, set MEMFIT_CACHE to a writable folder.",
            file=sys.stderr,
        )
    return own / kind


def _can_write(folder: Path) -> bool:
    """Make a folder if need be, and return whether files can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _own_folder(path: Path) -> Path | None:
    """Make a folder that only this user can write to, for libraries; None if others made it, or can write."""
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()  # of a link, which has all permissions
    except OSError:
        return None
    return path if status.st_uid == os.getuid() and not status.st_mode & 0o022 else None


def find_compiler() -> tuple[str, ...]:
    """Return the C compiler's command: ``$CC`` (``ccache gcc``), else ``cc``, ``gcc`` or ``clang``."""
    chosen = os.environ.get("CC", "").strip()
    try:
        commands = [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]
    except ValueError as error:  # an unclosed quotation
        raise UnsuitableEnvironmentError(
            f"Cannot build memfit's C code: CC={chosen} is not a valid command ({error})."
        ) from None
    for name, *options in commands:
        path = shutil.which(name)
        if path:
            return path, *options
    looked_for = f"$CC ({chosen})" if chosen else ", ".join(COMPILERS)
    raise UnsuitableEnvironmentError(
        f"Cannot build memfit's C code: no C compiler was found (looked for {looked_for}). "
        "Install one with apt install gcc or dnf install gcc. With conda, run conda install gcc_linux-64 and "
        "set CC to the compiler that it installs."
    )


def run_compiler(*command: str) -> None:
    """Run the compiler."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-_SHOWN_LINES:])
        raise GhostError(
            f"Cannot build memfit's C code: {command[0]} failed (exit code {done.returncode}). To try "
            f"another compiler, set CC. {command[0]} printed last:\n{output}"
        )


class NativeLibrary:
    """A library of memfit's own C code, compiled on first use and kept in the cache folder."""

    def __init__(self, kind: str, sources: Path, functions: Mapping[str, Signature]) -> None:
        """Describe a library."""
        self.sources = sources
        self._kind = kind
        self._functions = functions
        self._loaded: ctypes.CDLL | None = None

    def load(self) -> ctypes.CDLL:
        """Return the library, compiled if need be. It stays loaded.

        Raises:
            MemfitError: no C compiler was found, or it failed; or the cache folder cannot be written, or
                libraries cannot be loaded from it.
        """
        if self._loaded is None:
            try:
                self._loaded = self._cached()
            except OSError as error:
                raise UnsuitableEnvironmentError(
                    f"Cannot load memfit's C code: {error}. Set MEMFIT_CACHE to a folder that can be written "
                    "and from which libraries can be loaded."
                ) from None
        return self._loaded

    def open(self, path: Path) -> ctypes.CDLL:
        """Load a library that ``compile_c_folder`` made, and declare the types of its functions."""
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in self._functions.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        return library

    def _cached(self) -> ctypes.CDLL:
        digest = hashlib.sha256(repr((COMPILE_FLAGS, os.uname().machine)).encode())
        for source in (*shared_c_headers(), *sorted(self.sources.glob("*.[ch]"))):
            digest.update(source.name.encode() + b"\0" + source.read_bytes())
        name = f"{digest.hexdigest()[:16]}.so"
        path = cache_folder(self._kind, name) / name
        if path.exists():
            with suppress(OSError, AttributeError):  # a cache cleaner may have truncated it
                return self.open(path)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            compile_c_folder(self.sources, Path(folder) / path.name).replace(path)
        return self.open(path)


def shared_c_headers() -> list[Path]:
    """Return the headers that all of memfit's C code may include."""
    return sorted(SHARED_C.glob("*.h"))


def compile_c_folder(sources: Path, library: Path) -> Path:
    """Compile the C files of a folder.

    Raises:
        MemfitError: no C compiler was found, or it failed.
    """
    files = map(str, sorted(sources.glob("*.c")))
    run_compiler(*find_compiler(), *COMPILE_FLAGS, f"-I{SHARED_C}", "-shared", *files, "-o", str(library))
    return library


@contextmanager
def hold_file_lock(path: Path) -> Iterator[None]:
    """Hold a lock file, so that processes that start together compile once; exiting releases it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
