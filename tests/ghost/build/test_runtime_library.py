"""Building the ghost: the cache, concurrent first use, and errors for unsuitable environments."""

import errno
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from memfit.errors import GhostError, UnsuitableEnvironmentError
from memfit.ghost.build import runtime_library as build_module
from memfit.ghost.build.elf import ElfFile
from memfit.ghost.build.runtime_library import build_ghost, read_ghost_gaps
from memfit.ghost.build.torch_install import find_torch, scan_nvidia_imports
from memfit.native_build import find_compiler

pytestmark = pytest.mark.process

TORCH = find_torch()

pytestmark = pytest.mark.process


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def fake_torch(tmp_path):
    """Return a function that creates a package folder with the version of some PyTorch."""

    def make(version, cuda="'13.0'"):
        folder = tmp_path / "site-packages" / "torch"
        (folder / "lib").mkdir(parents=True)
        (folder / "version.py").write_text(
            "from typing import Optional\n"
            f"__version__ = '{version}'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n"
        )
        return folder

    return make


def test_the_ghost_is_built_once_and_then_found_in_the_cache(cache):
    messages = []
    first = build_ghost(report=messages.append)
    second = build_ghost(report=messages.append)
    assert first.built
    assert not second.built
    assert len(messages) == 1
    assert second.library == first.library
    assert first.library.is_relative_to(cache)
    assert {"libcuda.so.1", "libnvidia-ml.so.1"} <= set(first.sonames)
    assert first.torch_version == TORCH.version
    assert second.seconds == first.seconds
    assert {path.name for path in first.folder.parent.iterdir()} == {
        first.folder.name,
        f"{first.folder.name}.lock",
    }


def test_every_function_that_torch_imports_is_defined():
    done = build_ghost()
    wanted = scan_nvidia_imports(TORCH).symbols
    assert len(wanted) > 500
    with ElfFile(done.library) as library:
        assert library.defines(set(wanted)) == wanted
        names = {gap.name for gap in read_ghost_gaps()[0]}
        assert library.defines(names) == names
    known = {gap.name for gap in done.gaps}
    assert "cudaIpcGetEventHandle" in known  # imported
    assert "cuMulticastCreate" in known  # looked up by name


def test_the_empty_libraries_have_their_soname_and_versions():
    done = build_ghost()
    for soname, versions in scan_nvidia_imports(TORCH).sonames.items():
        with ElfFile(done.folder / soname) as empty:
            assert "libghost.so" in empty.needed()
        text = (done.folder / soname).read_bytes()
        assert all(version.encode() in text for version in versions)


def test_four_processes_can_build_at_the_same_time(cache):
    script = (
        "from memfit.ghost.build.runtime_library import build_ghost\n"
        "b = build_ghost(); print(b.built, b.library.exists())"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    answers = sorted(process.communicate(timeout=100)[0] for process in processes)
    assert answers == ["False True\n"] * 3 + ["True True\n"]


@pytest.mark.slow
def test_an_incomplete_build_is_rebuilt(cache):
    first = build_ghost()
    (first.folder / "build.json").unlink()
    assert build_ghost().built


@pytest.mark.slow
def test_another_torch_or_other_flags_have_their_own_folder(cache, tmp_path, monkeypatch):
    first = build_ghost()
    copy = tmp_path / "site-packages" / "torch"
    (copy / "lib").mkdir(parents=True)
    shutil.copy(TORCH.folder / "version.py", copy)
    for library in TORCH.libraries():
        (copy / "lib" / library.name).symlink_to(library)
    assert build_ghost(copy).built  # no metadata beside it: other versions are assumed
    monkeypatch.setattr(build_module, "COMPILE_FLAGS", (*build_module.COMPILE_FLAGS, "-O1"))
    other = build_ghost()
    assert other.built
    assert other.folder != first.folder


def test_reported_versions_are_those_torch_was_built_for():
    assert TORCH.pinned_version("nvidia-cudnn-cu")
    assert TORCH.pinned_version("nvidia-nccl-cu")
    assert TORCH.pinned_version("nvidia-nonsense-cu") is None


# ---- Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "cuda", "words"),
    [
        ("2.14.1+cpu", "None", ["CPU build (2.14.1+cpu)", "Install the CUDA build"]),
        ("2.9.1+cu128", "'12.8'", ["2.9.1+cu128", "PyTorch 2.10 or newer", "pip install -U torch"]),
    ],
)
def test_an_unsuitable_torch_is_refused_with_a_remedy(cache, fake_torch, version, cuda, words):
    with pytest.raises(UnsuitableEnvironmentError) as refused:
        build_ghost(fake_torch(version, cuda))
    assert all(word in str(refused.value) for word in words)
    assert not cache.exists()


def test_a_missing_torch_is_reported():
    script = (
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'torch' else find(name, *a)\n"
        "from memfit.ghost.build.runtime_library import build_ghost\nbuild_ghost()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "PyTorch is not installed" in done.stderr


@pytest.mark.slow
def test_building_does_not_import_torch(cache):
    script = (
        "import sys; from memfit.ghost.build.runtime_library import build_ghost\n"
        "build_ghost(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_another_platform_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(UnsuitableEnvironmentError, match=r"aarch64.*needs Linux on x86-64"):
        build_ghost()


def test_a_missing_compiler_is_reported_with_a_remedy(cache, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UnsuitableEnvironmentError, match="looked for cc, gcc, clang"):
        build_ghost()
    monkeypatch.setenv("CC", "tcc-9")
    with pytest.raises(UnsuitableEnvironmentError, match=r"looked for \$CC \(tcc-9\)"):
        build_ghost()


def test_a_failing_compiler_is_reported_with_its_output(cache, tmp_path, monkeypatch):
    compiler = tmp_path / "brokencc"
    compiler.write_text("#!/bin/sh\necho 'internal compiler error: broken' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(GhostError, match=r"exit code 3(.|\n)*internal compiler error: broken"):
        build_ghost()
    assert [path.suffix for path in (cache / "ghost").iterdir()] == [".lock"]  # nothing half-written


def test_a_cache_folder_without_space_is_reported(cache, monkeypatch):
    def fail(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_module.tempfile, "mkdtemp", fail)
    with pytest.raises(GhostError, match=r"No space left on device. Set MEMFIT_CACHE to a writable folder"):
        build_ghost()


def test_files_other_than_elf_are_rejected(tmp_path):
    path = tmp_path / "libfake.so"
    path.write_bytes(b"MZ" + bytes(64))
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        ElfFile(path)


def test_elf_reader_agrees_with_the_loader():
    """The symbols that this process can look up in libc are those that the file defines."""
    libc = next(
        Path(line.split()[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libc.so" in line
    )
    with ElfFile(libc) as library:
        assert library.defines({"malloc", "printf", "no_such_function"}) == {"malloc", "printf"}
        assert [name for name in library.needed() if name.startswith("ld-linux")]


@pytest.mark.parametrize(
    "damage",
    [
        lambda build: build.library.write_bytes(build.library.read_bytes()[:1000]),
        pytest.param(lambda build: (build.folder / build.sonames[0]).unlink(), marks=pytest.mark.slow),
    ],
    ids=["cut off", "an empty library is gone"],
)
def test_a_damaged_build_is_rebuilt(cache, damage):
    damage(build_ghost())
    assert build_ghost().built
    assert not build_ghost().built


def test_cc_can_be_a_command_with_options(monkeypatch):
    monkeypatch.setenv("CC", "cc -O1")
    assert find_compiler()[1:] == ("-O1",)
