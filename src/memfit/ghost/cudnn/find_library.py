"""Find the libcudnn that PyTorch would load here."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_SYSTEM = ("/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")


def find_library(soname: str, torch_folder: Path) -> Path | None:
    """Return the file that PyTorch would load for a SONAME ("libcudnn.so.9"), or None.

    Source: the RPATH of libtorch_cuda.so in PyTorch's wheels, then _preload_cuda_deps in
    torch/__init__.py 2.14 (nvidia/*/lib of every folder on the path); conda installs it in the
    environment's lib; then the system loader's folders.
    """
    return next((path for folder in _folders(torch_folder) if (path := folder / soname).is_file()), None)


def _folders(torch_folder: Path) -> Iterator[Path]:
    yield torch_folder / "lib"
    for entry in (torch_folder.parent, *map(Path, sys.path)):
        yield from sorted(entry.glob("nvidia/*/lib"))
    yield Path(sys.prefix) / "lib"
    yield from (Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if entry)
    yield from map(Path, _SYSTEM)
