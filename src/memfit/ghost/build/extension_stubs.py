"""Libraries that are loaded after PyTorch: what they want of NVIDIA's and the ghost lacks is refused by name.

    import flash_attn  ──audit hook──>  which NVIDIA functions, from which SONAMEs (wants.py)
                                        what the ghost lacks of them ──cc──> functions that refuse
    dlopen goes on     <──────────────  loaded for everyone to see: it finds all it wants

The ghost is built with what PyTorch imports. bitsandbytes, xformers or an extension of the user's may import
more; without it the loader's "undefined symbol" ends the import for functions that may never be called. So a
function is refused when it is called: with its library's own "not supported", and its name in the result.

A library made for another CUDA than PyTorch was is not loaded at all: it would find functions of the right
names, whose structures are laid out differently.
"""

import ctypes
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from memfit.errors import GhostError, MemfitError
from memfit.ghost.build.imported_symbols import NvidiaImports, nvidia_imports
from memfit.ghost.build.nvidia_names import NvidiaLibrary, nvidia_library
from memfit.ghost.build.runtime_library import INCLUDES, Build, make_empty_libraries
from memfit.native_build import COMPILE_FLAGS, find_compiler, run_compiler

# How the functions of a library say "not supported", or else the nearest they have. Sources: driver_types.h,
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


class ExtensionStubs:
    """What was lacking of the libraries that were loaded since ``watch``.

    Attributes:
        wanted_by: function that is refused -> file of the library that imports it.
        turned_away: why libraries were not loaded, one sentence each.
    """

    def __init__(self, build: Build, runtime: ctypes.CDLL) -> None:
        self.wanted_by: dict[str, str] = {}
        self.turned_away: list[str] = []
        self._build = build
        self._runtime = runtime
        self._served = {library.stem: library for library in map(nvidia_library, build.sonames) if library}
        self._sonames = set(build.sonames)
        self._seen: set[Path] = set()

    def watch(self) -> None:
        """Look at every library that Python loads from now on, for the life of the process."""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "import" and isinstance(arguments[1], str):
            self._prepare(arguments[1], ImportError)
        elif event == "ctypes.dlopen" and isinstance(arguments[0], str) and os.sep in arguments[0]:
            self._prepare(arguments[0], OSError)

    def _prepare(self, file: str, refusal: type[Exception]) -> None:
        path = Path(file).resolve()
        if path.is_relative_to(self._build.folder):
            return
        wanting = nvidia_imports(path, self._seen)
        try:
            for wanted in wanting:
                self._check_cuda(wanted)
            self._refuse_what_is_lacking(wanting)
        except MemfitError as error:
            self.turned_away.append(str(error))
            raise refusal(str(error)) from None

    def _check_cuda(self, wanted: NvidiaImports) -> None:
        """Raise for a library that was made for another CUDA than PyTorch was."""
        for library in wanted.libraries:
            served = self._served.get(library.stem, library)
            if library.major != served.major:
                raise GhostError(
                    f"{wanted.path.name} was not loaded: it needs {library.soname}, and the ghost stands in "
                    f"for {served.soname}, which PyTorch {self._build.torch_version} was made for. Install "
                    f"a build of it for CUDA {self._build.cuda_version}. ({wanted.path})"
                )

    def _refuse_what_is_lacking(self, wanting: Sequence[NvidiaImports]) -> None:
        refusals: dict[str, str] = {}
        sonames: dict[str, list[str]] = {}
        for wanted in wanting:
            for name, library in wanted.functions.items():
                if name not in self.wanted_by and not hasattr(self._runtime, name):
                    refusals[name] = _refusal(name, library)
                    self.wanted_by[name] = wanted.path.name
            for library, versions in wanted.libraries.items():
                if library.soname not in self._sonames:
                    sonames[library.soname] = sorted(versions | set(sonames.get(library.soname, ())))
        if refusals or sonames:
            folder = self._built(_source(refusals), dict(sorted(sonames.items())))
            for name in (_REFUSALS, *sonames):
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
            self._sonames |= sonames.keys()

    def _built(self, source: str, sonames: Mapping[str, Sequence[str]]) -> Path:
        """Return the folder of the libraries that serve, compiled on first use and then kept."""
        name = hashlib.sha256(f"{source}{sonames}".encode()).hexdigest()[:16]
        folder = self._build.folder / "extensions" / name
        if folder.is_dir():
            return folder
        try:
            folder.parent.mkdir(exist_ok=True)
            work = Path(tempfile.mkdtemp(dir=folder.parent))
            try:
                _compile(work, source, sonames, self._build.library)
                work.rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        except OSError as error:
            if not folder.is_dir():  # another process may have put it there meanwhile
                raise GhostError(
                    f"Cannot write to {folder.parent}: {error.strerror or error}. "
                    "Set MEMFIT_CACHE to a folder that can be written."
                ) from error
        return folder


_REFUSALS = "librefusals.so"


def _compile(work: Path, source: str, sonames: Mapping[str, Sequence[str]], ghost: Path) -> None:
    """Compile the functions that refuse, and an empty library for each SONAME that nobody stands for."""
    file, library = work / "refusals.c", work / _REFUSALS
    file.write_text(source)
    # Its SONAME is the source's, as another extension's refusals are in a library of the same file name.
    soname = f"-Wl,-soname,{hashlib.sha256(source.encode()).hexdigest()}"
    compiler = find_compiler()
    options = (*COMPILE_FLAGS, *INCLUDES, "-shared", soname)
    run_compiler(*compiler, *options, str(file), str(ghost), "-o", str(library))
    make_empty_libraries(work, sonames, library, compiler)


def _source(refusals: Mapping[str, str]) -> str:
    """Write the C of the functions that refuse; ``ghost/build/runtime_library.py`` on what they return."""
    functions = (
        f'API long {name}(void) {{ return ghost_gap_called("{name}", {refusal}); }}'
        for name, refusal in sorted(refusals.items())
    )
    return "\n".join(('#include "core/ghost.h"', *functions, ""))


def _refusal(name: str, library: NvidiaLibrary | None) -> str:
    """Return what a function returns, as C: a status, or a text where it gives texts."""
    if _GIVES_TEXT.search(name):
        return '(long)"not supported by memfit\'s ghost"'
    return str(_NOT_SUPPORTED.get(library.family if library else "cuda", _NOT_SUPPORTED["cuda"]))
