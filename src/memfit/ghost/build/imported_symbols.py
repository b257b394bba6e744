"""The NVIDIA functions that a library imports, read from its file before it is loaded.

flash_attn_2_cuda.so   NEEDED libcudart.so.13    imports cudaMalloc@libcudart.so.13
                       NEEDED libcuda.so.1       imports cuTensorMapEncodeTiled (no version: matched by name)
                       NEEDED libfa.so, in its RUNPATH: read the same way
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.ghost.build.elf import ElfFile
from memfit.ghost.build.nvidia_names import NvidiaLibrary, is_nvidia_function, nvidia_library

_BUILT_ON_TORCH = ("libtorch", "libc10_cuda")


@dataclass(frozen=True, slots=True)
class NvidiaImports:
    """The NVIDIA libraries and functions that one library needs."""

    path: Path
    libraries: dict[NvidiaLibrary, frozenset[str]]
    """The NVIDIA libraries it needs, with the symbol versions they must have."""
    functions: dict[str, NvidiaLibrary | None]
    """The functions it imports, and their libraries; None if the file names no library."""


def nvidia_imports(path: Path, seen: set[Path]) -> list[NvidiaImports]:
    """Return the NVIDIA imports of a library and of the libraries in its own search paths.

    Args:
        path: the library's file. An unreadable file has no imports: the loader will report it.
        seen: files to skip; the files read here are added.

    Returns:
        One entry for each library that has any.
    """
    files = list(_with_dependencies(path, seen))
    found = [wanted for file in files if (wanted := _imports_of(file))]
    defined = _defined(
        files, {name for wanted in found for name, library in wanted.functions.items() if not library}
    )
    return [
        replace(
            wanted, functions={n: where for n, where in wanted.functions.items() if where or n not in defined}
        )
        for wanted in found
    ]


def _with_dependencies(path: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield a library and those it needs from its own search paths, as the loader would find them."""
    if path in seen or _is_provided(path):
        return
    seen.add(path)
    try:
        with ElfFile(path) as library:
            needed, named = library.needed(), library.search_paths()
    except (OSError, ValueError):
        return
    yield path
    folders = [Path(folder.replace("$ORIGIN", str(path.parent))) for folder in named]
    for soname in needed:
        found = next((folder / soname for folder in folders if (folder / soname).is_file()), None)
        if found and not nvidia_library(soname):
            yield from _with_dependencies(found.resolve(), seen)


def _is_provided(path: Path) -> bool:
    """Return whether a library is PyTorch's, which the ghost was built for, or replaced by the ghost."""
    torch = path.parent.name == "lib" and path.parent.parent.name == "torch"
    return torch or nvidia_library(path.name) is not None


def _imports_of(path: Path) -> NvidiaImports | None:
    with ElfFile(path) as file:
        needed = file.needed()
        libraries = {soname: library for soname in needed if (library := nvidia_library(soname))}
        if not libraries and not any(soname.startswith(_BUILT_ON_TORCH) for soname in needed):
            return None
        imports = file.imports()
    functions = {wanted.name: libraries[wanted.soname] for wanted in imports if wanted.soname in libraries}
    unversioned = (wanted.name for wanted in imports if not wanted.soname)
    return NvidiaImports(
        path,
        {
            library: frozenset(wanted.version for wanted in imports if wanted.soname == soname)
            for soname, library in libraries.items()
        },
        functions | dict.fromkeys(filter(is_nvidia_function, unversioned)),
    )


def _defined(files: list[Path], names: set[str]) -> set[str]:
    """Return which of these names one of the files defines."""
    found: set[str] = set()
    for path in files if names else ():
        with ElfFile(path) as library:
            found |= library.defines(names)
    return found
