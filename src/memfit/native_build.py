"""The user's C compiler, and the folder where what it made is kept."""

import ctypes
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import platformdirs

from memfit.errors import GhostError, UnsuitableEnvironmentError

COMPILERS = ("cc", "gcc", "clang")
COMPILE_FLAGS = (
    "-std=c11",
    "-D_GNU_SOURCE",  # dladdr, MAP_FIXED_NOREPLACE, clock_gettime
    "-O2",
    "-fPIC",
    "-fvisibility=hidden",  # what is not marked API stays inside
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",  # prototypes are NVIDIA's; most of what they pass is of no use here
)
_SHOWN_LINES = 20


def cache_folder(kind: str = "ghost") -> Path:
    """Return where builds are kept: ``$MEMFIT_CACHE/ghost``, or the user's cache folder; or another kind."""
    chosen = os.environ.get("MEMFIT_CACHE")
    return (Path(chosen) if chosen else platformdirs.user_cache_path("memfit")) / kind


def find_compiler() -> tuple[str, ...]:
    """Return the C compiler's command: ``$CC`` (``ccache gcc``), or the first of ``cc``, ``gcc``, ``clang``.

    Raises:
        UnsuitableEnvironmentError: there is none.

    """
    chosen = os.environ.get("CC", "").strip()
    try:
        commands = [shlex.split(chosen)] if chosen else [[name] for name in COMPILERS]
    except ValueError as error:  # a quotation without end
        raise UnsuitableEnvironmentError(f"CC={chosen} is no command: {error}.") from None
    for name, *options in commands:
        path = shutil.which(name)
        if path:
            return path, *options
    looked_for = f"$CC ({chosen})" if chosen else ", ".join(COMPILERS)
    raise UnsuitableEnvironmentError(
        f"Cannot build memfit's C code: no C compiler was found (looked for {looked_for}). "
        "Install one: apt install gcc, dnf install gcc, or conda install gcc_linux-64 and set CC."
    )


def run_compiler(*command: str) -> None:
    """Run the compiler.

    Raises:
        GhostError: it failed; with its last lines.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = "\n".join((done.stdout + done.stderr).splitlines()[-_SHOWN_LINES:])
        raise GhostError(
            f"Cannot build memfit's C code: {command[0]} failed (exit code {done.returncode}). "
            f"Try another compiler by setting CC. Its last lines:\n{output}"
        )


def kept_library(kind: str, sources: Path, opened: Callable[[Path], ctypes.CDLL]) -> ctypes.CDLL:
    """Return the library of a folder's C files, compiled when first needed and kept in the cache folder.

    Raises:
        MemfitError: there is no compiler, or it failed.
        OSError: the cache folder cannot be written, or the library not be loaded.
    """
    digest = hashlib.sha256(repr((COMPILE_FLAGS, os.uname().machine)).encode())
    for source in sorted(sources.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    path = cache_folder(kind) / f"{digest.hexdigest()[:16]}.so"
    if path.exists():
        with suppress(OSError, AttributeError):  # whoever tidies caches left half of it
            return opened(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compile_library(sources, Path(folder) / path.name).replace(path)
    return opened(path)


def compile_library(sources: Path, library: Path) -> Path:
    """Compile the C files of a folder.

    Raises:
        MemfitError: there is no compiler, or it failed.
    """
    files = map(str, sorted(sources.glob("*.c")))
    run_compiler(*find_compiler(), *COMPILE_FLAGS, "-shared", *files, "-o", str(library))
    return library


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file, so that processes that start together compile once. Released if we die."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
