"""Build the ghost runtime for the installed PyTorch, on first use.

    torch/lib/*.so ──scan──> the NVIDIA functions it imports, and their SONAMEs
    runtime/**/*.c ─────────> the functions that are implemented  ─┐
    gaps.txt       ─────────> the functions that return an error   ├─> libghost.so
    the rest       ─────────> stubs that return success           ─┘
    each SONAME    ─────────> an empty library of that name, whose symbols are in libghost.so

The result is stored in the user's cache folder, per PyTorch and source. It is moved there only when complete,
so several processes can build it at the same time.
"""

import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from memfit import native_build
from memfit.errors import GhostError
from memfit.ghost.build.elf import ElfFile
from memfit.ghost.build.torch_install import TorchImports, TorchInstall, find_torch, scan_nvidia_imports
from memfit.native_build import (
    COMPILE_FLAGS,
    SHARED_C,
    cache_folder,
    find_compiler,
    hold_file_lock,
    run_compiler,
    shared_c_headers,
)

RUNTIME = Path(__file__).parents[1] / "runtime"
INCLUDES = (f"-I{RUNTIME}", f"-I{SHARED_C}")
"""Compiler options for C that includes ``core/ghost.h``."""
NO_DEVICE = Path(__file__).parents[1] / "cudnn" / "no_device.c"
_DONE = "build.json"


@dataclass(frozen=True, slots=True)
class GhostGap:
    """A function that PyTorch can call and the ghost refuses (runtime/gaps.txt)."""

    name: str
    library: str
    reason: str


@dataclass(frozen=True, slots=True)
class BuiltGhost:
    """A ghost runtime that is ready to be loaded."""

    folder: Path
    library: Path
    """The runtime itself."""
    no_device: Path
    """A libcuda.so.1 that reports no device, for querying the real cuDNN."""
    sonames: tuple[str, ...]
    """The empty libraries in the same folder, which replace NVIDIA's."""
    torch_version: str
    cuda_version: str
    gaps: tuple[GhostGap, ...]
    """The known gaps: functions that this PyTorch imports or looks up and the ghost refuses."""
    sizes: dict[str, int]
    """Bytes of each library, by file name."""
    seconds: float
    """The duration of the build, in this process or an earlier one."""
    built: bool
    """Whether this process built it, rather than finding it in the cache."""


def build_ghost(
    torch_folder: Path | None = None, *, report: Callable[[str], None] | None = None
) -> BuiltGhost:
    """Return the ghost for the installed PyTorch, building it on first use.

    Args:
        torch_folder: PyTorch's package folder; by default the one this interpreter would import.
        report: called with one line of progress before a build.

    Raises:
        UnsuitableEnvironmentError: the platform, PyTorch or the compiler is unsuitable.
        GhostError: the compiler failed, or the cache folder cannot be written.

    Example:
        >>> build_ghost().torch_version  # doctest: +SKIP
        '2.14.1+cu130'

    """
    torch = find_torch(torch_folder)
    flags = _version_flags(torch)
    name = f"{torch.version}-{_fingerprint(torch, flags)}"
    folder = cache_folder("ghost", f"{name}/{_DONE}") / name
    found = _read(folder)
    if found:
        return found
    compiler = find_compiler()
    try:
        with hold_file_lock(folder.with_name(f"{folder.name}.lock")):
            found = _read(folder)
            if found:
                return found
            if report:
                report(f"building the ghost for PyTorch {torch.version} (once)")
            return _build_into(folder, torch, flags, compiler)
    except OSError as error:
        raise GhostError(
            f"Cannot build the ghost in {folder.parent}: {error.strerror or error}. "
            "Set MEMFIT_CACHE to a writable folder."
        ) from error


def _version_flags(torch: TorchInstall) -> tuple[str, ...]:
    """Return the compiler flags for the versions that the runtime reports: those of this PyTorch."""
    major, minor = (int(part) for part in torch.cuda.split(".")[:2])
    flags = [f"-DCUDA_VERSION={1000 * major + 10 * minor}"]
    for macro, package in (("CUDNN_VERSION", "nvidia-cudnn-cu"), ("NCCL_VERSION", "nvidia-nccl-cu")):
        version = torch.pinned_version(package)
        if version:
            flags.append(f"-D{macro}={10000 * version[0] + 100 * version[1] + version[2]}")
    return tuple(flags)


def _fingerprint(torch: TorchInstall, flags: Sequence[str]) -> str:
    """Return a digest of all inputs of a build: memfit's sources and this PyTorch's files."""
    digest = hashlib.sha256(repr((COMPILE_FLAGS, flags)).encode())
    here = Path(__file__)
    ours = [Path(native_build.__file__), here, here.with_name("elf.py"), here.with_name("torch_install.py")]
    for source in (
        *ours,
        *shared_c_headers(),
        *sorted(RUNTIME.rglob("*.[ch]")),
        RUNTIME / "gaps.txt",
        NO_DEVICE,
    ):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for library in torch.libraries():
        digest.update(f"{library.name} {library.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _read(folder: Path) -> BuiltGhost | None:
    try:
        text = (folder / _DONE).read_bytes()
        kept = msgspec.json.decode(text, type=BuiltGhost, dec_hook=lambda kind, value: kind(value))
    except (OSError, msgspec.DecodeError):  # missing or unreadable: it is built again
        return None
    # A cache cleaner may have deleted or truncated a library.
    for name in (kept.library.name, kept.no_device.name, *kept.sonames):
        path = folder / name
        if not path.is_file() or path.stat().st_size != kept.sizes.get(name):
            return None
    return replace(
        kept, folder=folder, library=folder / kept.library.name, no_device=folder / kept.no_device.name
    )  # the cache folder may have been moved


def _build_into(
    folder: Path, torch: TorchInstall, flags: Sequence[str], compiler: Sequence[str]
) -> BuiltGhost:
    start = time.perf_counter()
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        wanted = scan_nvidia_imports(torch)
        gaps = _compile_runtime(work, wanted, flags, compiler)
        make_forwarding_libraries(work, wanted.sonames, work / "libghost.so", compiler)
        _make_no_device(work, compiler)
        # Triton links its launcher with -lcuda, which it searches in $TRITON_LIBCUDA_PATH.
        (work / "libcuda.so").symlink_to("libcuda.so.1")
        done = BuiltGhost(
            folder=folder,
            library=folder / "libghost.so",
            no_device=folder / "libnodevice.so",
            sonames=tuple(wanted.sonames),
            torch_version=torch.version,
            cuda_version=torch.cuda,
            gaps=gaps,
            sizes={path.name: path.stat().st_size for path in work.glob("*.so*")},
            seconds=round(time.perf_counter() - start, 3),
            built=False,
        )
        (work / _DONE).write_bytes(msgspec.json.encode(done, enc_hook=str))
        shutil.rmtree(folder, ignore_errors=True)  # a folder without build.json is not in use
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return replace(done, built=True)


def _compile_runtime(
    work: Path, wanted: TorchImports, flags: Sequence[str], compiler: Sequence[str]
) -> tuple[GhostGap, ...]:
    sources = sorted(RUNTIME.rglob("*.c"))
    objects = [work / f"{source.parent.name}-{source.stem}.o" for source in sources]
    flags = (*COMPILE_FLAGS, *flags, *INCLUDES)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
        jobs = [
            workers.submit(run_compiler, *compiler, *flags, "-c", str(source), "-o", str(made))
            for source, made in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
    written = _linked_without_stubs(work, objects, wanted, compiler)
    gaps, refusals = read_ghost_gaps()
    stubs = work / "stubs.c"
    stubs.write_text(
        _stubs(wanted.symbols - written, {name: refusals[name] for name in refusals.keys() - written})
    )
    library = work / "libghost.so"
    link = ("-shared", "-Wl,-soname,libghost.so", "-o", str(library))
    run_compiler(
        *compiler, *COMPILE_FLAGS, *INCLUDES, str(stubs), *map(str, objects), *link, "-ldl", "-lpthread"
    )
    for path in objects:
        path.unlink()
    by_name = re.compile(r"cu[A-Z]")  # driver functions, which PyTorch looks up at run time, not imports
    return tuple(gap for gap in gaps if gap.name in wanted.symbols or by_name.match(gap.name))


def _linked_without_stubs(
    work: Path, objects: Sequence[Path], wanted: TorchImports, compiler: Sequence[str]
) -> set[str]:
    """Return the functions that the sources define, by linking them once and reading the result."""
    library = work / "written.so"
    run_compiler(*compiler, "-shared", "-o", str(library), *map(str, objects))
    with ElfFile(library) as linked:
        written = linked.defines(set(wanted.symbols) | {gap.name for gap in read_ghost_gaps()[0]})
    library.unlink()
    return written


def read_ghost_gaps() -> tuple[tuple[GhostGap, ...], dict[str, int]]:
    """Read ``runtime/gaps.txt``: the gaps in order, and the status that each returns."""
    gaps, refusals = [], {}
    library, status, reason = "", 0, ""
    for line in (RUNTIME / "gaps.txt").read_text(encoding="utf-8").splitlines():
        heading = re.fullmatch(r"\[(.+)\] returns (-?\d+): (.+)", line)
        if heading:
            library, status, reason = heading[1], int(heading[2]), heading[3]
        elif line and not line.startswith("#"):
            gaps.append(GhostGap(line, library, reason))
            refusals[line] = status
    return tuple(gaps), refusals


def _stubs(plain: frozenset[str], refusals: dict[str, int]) -> str:
    """Return the C source of the generated functions.

    They take no arguments and return a long: on x86-64 the caller clears its own arguments away, and
    reads as much of the result as it expects.
    """
    lines = ['#include "core/ghost.h"']
    lines += [
        f"API long {name}(void) {{ return ghost_stub_called(); }}" for name in sorted(plain - refusals.keys())
    ]
    lines += [
        f'API long {name}(void) {{ return ghost_gap_called("{name}", {status}); }}'
        for name, status in sorted(refusals.items())
    ]
    return "\n".join(lines) + "\n"


def make_forwarding_libraries(
    work: Path, sonames: Mapping[str, Sequence[str]], behind: Path, compiler: Sequence[str]
) -> None:
    """Build one empty library per SONAME, with the right symbol versions and a dependency on ``behind``.

    A library's dependency names a SONAME and a symbol version; the loader checks both, and then finds the
    symbol itself in ``behind``, which was loaded with RTLD_GLOBAL.

    Args:
        work: the folder to build them in.
        sonames: SONAME of each library -> the symbol versions it must have.
        behind: the library that defines the symbols.
        compiler: the compiler's command.

    Raises:
        GhostError: the compiler failed.
    """
    (work / "empty.c").write_text("")

    def make(soname: str, versions: Sequence[str]) -> None:
        arguments = [str(work / "empty.c"), "-shared", "-o", str(work / soname), f"-Wl,-soname,{soname}"]
        if versions:
            script = work / f"{soname}.versions"
            script.write_text("".join(f"{version} {{ }};\n" for version in versions))
            arguments.append(f"-Wl,--version-script,{script}")
        run_compiler(*compiler, *arguments, "-Wl,--no-as-needed,-rpath,$ORIGIN", str(behind))

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
        for _ in workers.map(lambda item: make(*item), sonames.items()):
            pass


def _make_no_device(work: Path, compiler: Sequence[str]) -> None:
    """Build the libcuda.so.1 that reports no device, under another file name."""
    link = ("-shared", "-Wl,-soname,libcuda.so.1", "-o", str(work / "libnodevice.so"))
    run_compiler(*compiler, *COMPILE_FLAGS, str(NO_DEVICE), *link)
