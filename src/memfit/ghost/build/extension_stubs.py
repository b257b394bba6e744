"""Stubs for NVIDIA functions that extensions import and the ghost does not implement.

    import flash_attn  ──watch──>  which NVIDIA functions, from which SONAMEs
                                   those that the ghost lacks ──cc──> stubs that return an error
    dlopen continues   <─────────  stubs loaded with RTLD_GLOBAL: every symbol resolves

The ghost implements the functions that PyTorch imports. bitsandbytes, xformers or the user's own extension
may import more; without stubs, the loader's "undefined symbol" would end the import because of functions that
may never be called. A stub fails only when it is called: with its library's own "not supported" status. The
report then names the function.

Imports are read from the library's file before it is loaded, and from those of its dependencies:

    flash_attn_2_cuda.so   NEEDED libcudart.so.13    imports cudaMalloc@libcudart.so.13
                           NEEDED libcuda.so.1       imports cuTensorMapEncodeTiled (matched by name)
                           NEEDED libfa.so, in its RUNPATH: read the same way

A library that was built for another CUDA version than PyTorch is not loaded: it would find functions of the
right names whose structures have another layout.

Python's audit hooks would see every library, too, but also each ``id()``, which then takes ten times as long.
"""

import ctypes
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from memfit.errors import GhostError, MemfitError
from memfit.ghost.build.elf import ElfFile
from memfit.ghost.build.runtime_library import INCLUDES, BuiltGhost, make_forwarding_libraries
from memfit.ghost.build.torch_install import NvidiaLibrary, is_nvidia_function, nvidia_library_of_soname
from memfit.native_build import COMPILE_FLAGS, cache_folder, find_compiler, run_compiler
from memfit.patching.patches import Patch

# The status "not supported" of each library, or the closest one it has. Sources: driver_types.h,
# cuda.h, cublas_api.h, cudnn_graph.h, cufft.h, curand.h, cusolver_common.h, cusparse.h, cutensor/types.h,
# nccl.h, nvml.h, nvjpeg.h, nvrtc.h.
_NOT_SUPPORTED = {
    "cuda": 801,
    "cudart": 801,
    "cublas": 15,
    "cudnn": 3000,
    "cufft": 16,
    "curand": 203,
    "cusolver": 9,
    "cusparse": 10,
    "cutensor": 15,
    "nccl": 3,
    "nvidia-ml": 3,
    "nvjpeg": 9,
    "nvrtc": 11,
}
_GIVES_TEXT = re.compile(r"(Error|Status|Result)_?(String|Name|Text)$")


_WHY = "load stubs for the NVIDIA functions that a library imports"
_IMPORT = Patch("importlib.machinery:ExtensionFileLoader", "create_module", why=_WHY)
_DLOPEN = Patch("ctypes:CDLL", "__init__", why=_WHY)


@dataclass(frozen=True, slots=True)
class NvidiaImports:
    """The NVIDIA libraries and functions that one library needs."""

    path: Path
    libraries: dict[NvidiaLibrary, frozenset[str]]
    """The NVIDIA libraries it needs, with the symbol versions they must have."""
    functions: dict[str, NvidiaLibrary | None]
    """The functions it imports, and their libraries; None if the file names no library."""


class ExtensionStubs:
    """The stubs for libraries loaded since ``watch``.

    Attributes:
        imported_by: stub function -> file of the library that imports it.
        rejections: why libraries were not loaded, one message each.
    """

    def __init__(self, build: BuiltGhost, runtime: ctypes.CDLL) -> None:
        self.imported_by: dict[str, str] = {}
        self.rejections: list[str] = []
        self._build = build
        self._runtime = runtime
        self._provided = {
            library.stem: library for library in map(nvidia_library_of_soname, build.sonames) if library
        }
        self._sonames = set(build.sonames)
        self._seen: set[Path] = set()

    def watch(self) -> None:
        """Inspect every library that Python loads from now on, for the life of the process."""
        _IMPORT.wrap("create_module", self._import)
        _DLOPEN.wrap("__init__", self._dlopen)

    def _import(self, create: Callable[..., Any], loader: Any, spec: Any) -> Any:
        self._prepare(spec.origin, ImportError)
        return create(loader, spec)

    def _dlopen(
        self, init: Callable[..., None], library: Any, name: Any = None, *args: Any, **kw: Any
    ) -> None:
        if name and os.sep in (file := os.fsdecode(name)):
            self._prepare(file, OSError)
        init(library, name, *args, **kw)

    def _prepare(self, file: str, refusal: type[Exception]) -> None:
        path = Path(file).resolve()
        if path.is_relative_to(self._build.folder):
            return
        imported = nvidia_imports(path, self._seen)
        try:
            for imports in imported:
                self._check_cuda(imports)
            self._load_stubs(imported)
        except MemfitError as error:
            self.rejections.append(str(error))
            raise refusal(str(error)) from None

    def _check_cuda(self, imports: NvidiaImports) -> None:
        """Raise for a library that was built for another CUDA version than PyTorch."""
        for library in imports.libraries:
            provided = self._provided.get(library.stem, library)
            if library.major != provided.major:
                raise GhostError(
                    f"{imports.path.name} was not loaded: it needs {library.soname}, but PyTorch "
                    f"{self._build.torch_version} and the ghost use {provided.soname}. Find the "
                    f"package that contains {imports.path}, and install its build for CUDA "
                    f"{self._build.cuda_version}."
                )

    def _load_stubs(self, imported: Sequence[NvidiaImports]) -> None:
        refusals: dict[str, str] = {}
        sonames: dict[str, list[str]] = {}
        for imports in imported:
            for name, library in imports.functions.items():
                if name not in self.imported_by and not hasattr(self._runtime, name):
                    refusals[name] = _stub_result(name, library)
                    self.imported_by[name] = imports.path.name
            for library, versions in imports.libraries.items():
                if library.soname not in self._sonames:
                    sonames[library.soname] = sorted(versions | set(sonames.get(library.soname, ())))
        if refusals or sonames:
            folder = self._stub_folder(_source(refusals), dict(sorted(sonames.items())))
            for name in (_STUBS, *sonames):
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
            self._sonames |= sonames.keys()

    def _stub_folder(self, source: str, sonames: Mapping[str, Sequence[str]]) -> Path:
        """Return the folder of the stub libraries, compiled on first use and then cached."""
        name = hashlib.sha256(f"{source}{sonames}".encode()).hexdigest()[:16]
        folder = cache_folder(f"ghost/{self._build.folder.name}/extension_stubs", name) / name
        if folder.is_dir():
            return folder
        try:
            work = Path(tempfile.mkdtemp(dir=folder.parent))
            try:
                _compile(work, source, sonames, self._build.library)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            if not folder.is_dir():  # another process may have built it in the meantime
                raise GhostError(
                    f"Cannot write to {folder.parent}: {error.strerror or error}. "
                    "Set MEMFIT_CACHE to a writable folder."
                ) from error
        return folder


_STUBS = "libstubs.so"


def _compile(work: Path, source: str, sonames: Mapping[str, Sequence[str]], ghost: Path) -> None:
    """Compile the stubs, and an empty library for each SONAME that the ghost does not provide yet."""
    file, library = work / "stubs.c", work / _STUBS
    file.write_text(source)
    # The SONAME is the source's digest: another extension's stubs are in a library of the same file name.
    soname = f"-Wl,-soname,{hashlib.sha256(source.encode()).hexdigest()}"
    compiler = find_compiler()
    options = (*COMPILE_FLAGS, *INCLUDES, "-shared", soname)
    run_compiler(*compiler, *options, str(file), str(ghost), "-o", str(library))
    make_forwarding_libraries(work, sonames, library, compiler)


def _source(refusals: Mapping[str, str]) -> str:
    """Return the C source of the stubs; ``memfit.ghost.build.runtime_library`` explains their signature."""
    functions = (
        f'API long {name}(void) {{ return ghost_gap_called("{name}", {refusal}); }}'
        for name, refusal in sorted(refusals.items())
    )
    return "\n".join(('#include "core/ghost.h"', *functions, ""))


def _stub_result(name: str, library: NvidiaLibrary | None) -> str:
    """Return a stub's result as C: a status, or a string if the function returns strings."""
    if _GIVES_TEXT.search(name):
        return '(long)"not supported by memfit\'s ghost"'
    return str(_NOT_SUPPORTED.get(library.family if library else "cuda", _NOT_SUPPORTED["cuda"]))


_BUILT_ON_TORCH = ("libtorch", "libc10_cuda")


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
        if found and not nvidia_library_of_soname(soname):
            yield from _with_dependencies(found.resolve(), seen)


def _is_provided(path: Path) -> bool:
    """Return whether a library is PyTorch's, which the ghost was built for, or replaced by the ghost."""
    torch = path.parent.name == "lib" and path.parent.parent.name == "torch"
    return torch or nvidia_library_of_soname(path.name) is not None


def _imports_of(path: Path) -> NvidiaImports | None:
    with ElfFile(path) as file:
        needed = file.needed()
        libraries = {soname: library for soname in needed if (library := nvidia_library_of_soname(soname))}
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
