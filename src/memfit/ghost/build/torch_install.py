"""The installed PyTorch: its folder, its versions, and its imports from NVIDIA's libraries.

All of it is read without importing PyTorch: that takes seconds, and on a machine without NVIDIA's libraries
it would fail before the ghost is loaded.
"""

import importlib.util
import platform
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from memfit.errors import UnsuitableEnvironmentError
from memfit.ghost.build.elf import ElfFile

OLDEST = (2, 10)
"""The oldest PyTorch release that memfit supports."""

_LOADED_BY_NAME = ("libcuda.so.1", "libnvidia-ml.so.1")


@dataclass(frozen=True, slots=True)
class TorchInstall:
    """An installed CUDA build of PyTorch."""

    folder: Path
    """The package folder, with ``lib`` inside."""
    version: str
    """As ``torch.__version__``: "2.14.1+cu130"."""
    cuda: str
    """As ``torch.version.cuda``: "13.0"."""

    def libraries(self) -> list[Path]:
        """Return PyTorch's own shared libraries."""
        return sorted((self.folder / "lib").glob("*.so*"))

    def pinned_version(self, package: str) -> tuple[int, int, int] | None:
        """Return the version of an NVIDIA package that this PyTorch's metadata pins, or None.

        Args:
            package: the beginning of its name, such as "nvidia-cudnn-cu".

        """
        for metadata in self.folder.parent.glob("torch-*.dist-info/METADATA"):
            text = metadata.read_text(encoding="utf-8", errors="replace")
            found = re.search(rf"^Requires-Dist: {package}\d+==(\d+)\.(\d+)\.(\d+)", text, re.MULTILINE)
            if found:
                return int(found[1]), int(found[2]), int(found[3])
        return None


@dataclass(frozen=True, slots=True)
class TorchImports:
    """The NVIDIA libraries and functions that an installation imports."""

    sonames: dict[str, tuple[str, ...]]
    """SONAME of each library -> the symbol versions it must have."""
    symbols: frozenset[str]


def find_torch(folder: Path | None = None) -> TorchInstall:
    """Find PyTorch and check that it can run on the ghost.

    Args:
        folder: the package folder; by default the one this interpreter would import.

    """
    _check_platform()
    folder = folder or _package_folder()
    text = _version_file(folder)
    version = _assigned(text, "__version__")
    if version is None:
        raise UnsuitableEnvironmentError(
            f"Cannot run on the ghost: {folder / 'version.py'} does not define a version. Reinstall torch."
        )
    cuda = _assigned(text, "cuda")
    if cuda is None:
        build = "ROCm" if _assigned(text, "hip") else "CPU"
        raise UnsuitableEnvironmentError(
            f"Cannot run on the ghost: the installed PyTorch is the {build} build ({version}). "
            "Install the CUDA build (pip install torch; no GPU is needed)."
        )
    if _release(version) < OLDEST:
        raise UnsuitableEnvironmentError(
            f"Cannot run on the ghost: the installed PyTorch is {version}, and memfit needs PyTorch "
            f"{OLDEST[0]}.{OLDEST[1]} or newer. Upgrade it: pip install -U torch."
        )
    return TorchInstall(folder, version, cuda)


def installed_torch_version() -> str:
    """Return the version of the PyTorch that this interpreter would import, whichever build it is.

    Raises:
        UnsuitableEnvironmentError: there is none.
    """
    return _assigned(_version_file(_package_folder()), "__version__") or ""


def scan_nvidia_imports(torch: TorchInstall) -> TorchImports:
    """Read the NVIDIA libraries and functions that PyTorch's libraries import."""
    sonames: dict[str, set[str]] = {name: set() for name in _LOADED_BY_NAME}
    symbols: set[str] = set()
    unversioned: set[str] = set()  # libcuda.so.1 has no symbol versions: its functions are matched by name
    for path in torch.libraries():
        with ElfFile(path) as library:
            for needed in library.needed():
                if nvidia_library_of_soname(needed):
                    sonames.setdefault(needed, set())
            for wanted in library.imports():
                if nvidia_library_of_soname(wanted.soname):
                    sonames.setdefault(wanted.soname, set()).add(wanted.version)
                    symbols.add(wanted.name)
                elif not wanted.soname and is_nvidia_function(wanted.name):
                    unversioned.add(wanted.name)
    for path in torch.libraries():
        with ElfFile(path) as library:
            unversioned -= library.defines(unversioned)
    return TorchImports(
        sonames={name: tuple(sorted(versions)) for name, versions in sorted(sonames.items())},
        symbols=frozenset(symbols | unversioned),
    )


def _check_platform() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise UnsuitableEnvironmentError(
            f"Cannot run on the ghost: this is {platform.system()} on {platform.machine()}, "
            "and the ghost needs Linux on x86-64 (WSL and containers work)."
        )


def _package_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise UnsuitableEnvironmentError(
            f"Cannot run on the ghost: PyTorch is not installed for {sys.executable}. "
            "Install its CUDA build for this Python (pip install torch; no GPU is needed)."
        )
    return Path(spec.submodule_search_locations[0])


def _version_file(folder: Path) -> str:
    """Return the text of a package's version.py; empty if it has none."""
    try:
        return (folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""


def _assigned(text: str, name: str) -> str | None:
    """Return the string that version.py assigns to a name, or None."""
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


# libcudart.so.13, libcudnn_ops.so.9; bundled in a wheel libcudart.faf08d9a.so.13, libcudart-faf08d9a.so.13.0
_LIBRARY = re.compile(
    r"lib(?P<stem>(?P<family>cudart|cuda|cublas|cudnn|cufft|cufile|cupti|curand|cusolver|cusparse|cutensor|nccl|"
    r"npp|nvJitLink|nvToolsExt|nvcuvid|nvfatbin|nvidia-ml|nvjpeg|nvrtc|nvshmem)(?:Lt|Mg|w|[a-z]{1,4}|_\w+)?)"
    r"(?:[.-][0-9a-f]{8})?\.so\.(?P<major>\d+)"
)
_FUNCTION = re.compile(
    r"((__)?cu(da|blas(Lt)?|dnn|fft|sparse(Lt)?|solver|rand|pti|File|tensor)?|nccl|nvjpeg|nvml|nvrtc)[A-Z]\w+"
    r"|nvshmemx?_\w+|npp[a-z]+[A-Z]?\w*_\w+|(__)?nvJitLink\w+"
)


@dataclass(frozen=True, slots=True)
class NvidiaLibrary:
    """A library of NVIDIA's, recognised by its SONAME."""

    soname: str
    stem: str
    """``cudart``, ``cublasLt``, ``cudnn_ops``: its name without version and packaging."""
    family: str
    """``cudart``, ``cublas``, ``cudnn``: the API whose status values its functions return."""
    major: str


def nvidia_library_of_soname(soname: str) -> NvidiaLibrary | None:
    """Return the NVIDIA library of a SONAME or file name, or None.

    >>> nvidia_library_of_soname("libcudnn_ops.so.9").family, nvidia_library_of_soname("libcurl.so.4")
    ('cudnn', None)
    """
    found = _LIBRARY.match(soname)
    return NvidiaLibrary(soname, found["stem"], found["family"], found["major"]) if found else None


def is_nvidia_function(name: str) -> bool:
    """Return whether a function imported without a library's name is one of NVIDIA's.

    >>> is_nvidia_function("cuTensorMapEncodeTiled"), is_nvidia_function("curl_easy_init")
    (True, False)
    """
    return _FUNCTION.fullmatch(name) is not None
