"""Extensions that import more NVIDIA functions than PyTorch: they load; missing functions return errors."""

import ctypes
import subprocess

import pytest

from memfit.ghost.build.extension_stubs import nvidia_imports
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.build.torch_install import nvidia_library_of_soname
from memfit.native_build import find_compiler

pytestmark = pytest.mark.process

SOURCE = """
int cudaMalloc(void **pointer, unsigned long size);
int nvjpegCreateSimple(void **handle);
int cuMadeUp(void);
const char *nvjpegGetErrorString(int error);
int helper(void);
int cudaHelper(void);

int known(void) { void *pointer; return cudaMalloc(&pointer, 100); }
int unknown(void) { void *handle; return nvjpegCreateSimple(&handle); }
int of_the_driver(void) { return cuMadeUp(); }
const char *text(void) { return nvjpegGetErrorString(0); }
int of_a_sibling(void) { return cudaHelper(); }
"""
EMPTY = "int nvjpegCreateSimple(void **h) { return 0; } const char *nvjpegGetErrorString(int e) { return 0; }"
MODULE = "void *PyInit_extension(void) { return 0; }"  # Python loads it and reports "initialization failed"

pytestmark = pytest.mark.process


class Workshop:
    """Compiles libraries as their authors would, against NVIDIA libraries that are deleted afterwards."""

    def __init__(self, folder):
        self.folder = folder
        self.ghost = build_ghost()

    def library(self, name, source, *options, soname=None):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        (self.folder / "source.c").write_text(source)
        command = [
            *find_compiler(),
            "-shared",
            "-fPIC",
            f"-Wl,-soname,{soname or path.name}",
            "-o",
            str(path),
        ]
        command += [str(self.folder / "source.c"), *map(str, options)]
        subprocess.run(command, check=True)
        return path

    def versioned(self, soname, source=EMPTY):
        """Return a library whose symbols carry its SONAME as their version, as NVIDIA's do."""
        (self.folder / "versions").write_text(f"{soname} {{ global: *; }};\n")
        return self.library(f"nvidia/{soname}", source, f"-Wl,--version-script,{self.folder / 'versions'}")

    def extension(self, name="extension.so", source=SOURCE, cudart=None):
        sibling = self.library("beside/libsibling.so", "int cudaHelper(void) { return 7; }")
        nvjpeg = self.versioned("libnvjpeg.so.13")
        extension = self.library(
            name,
            source,
            "-Wl,--no-as-needed,-rpath,$ORIGIN/beside",
            sibling,
            nvjpeg,
            cudart or self.ghost.folder / "libcudart.so.13",
            self.ghost.folder / "libcuda.so.1",
            "-Wl,--allow-shlib-undefined",
        )
        nvjpeg.unlink()
        return extension


@pytest.fixture
def workshop(tmp_path):
    return Workshop(tmp_path)


def test_nvidia_imports_are_read_from_the_librarys_file(workshop):
    (wanted,) = nvidia_imports(workshop.extension(), set())
    assert {library.soname: versions for library, versions in wanted.libraries.items()} == {
        "libnvjpeg.so.13": {"libnvjpeg.so.13"},
        "libcudart.so.13": set(),  # the ghost's own is empty, so that no version was recorded
        "libcuda.so.1": set(),
    }
    assert wanted.functions.keys() == {"cudaMalloc", "nvjpegCreateSimple", "nvjpegGetErrorString", "cuMadeUp"}
    assert wanted.functions["nvjpegCreateSimple"].family == "nvjpeg"
    assert wanted.functions["cuMadeUp"] is None


@pytest.mark.parametrize(
    ("soname", "family"),
    [
        ("libcudart.so.13", "cudart"),
        ("libcudart.faf08d9a.so.13", "cudart"),
        ("libcudart-9335f6a2.so.12.4.127", "cudart"),
        ("libcublasLt.so.13", "cublas"),
        ("libcudnn_engines_precompiled.so.9", "cudnn"),
        ("libnppif.so.13", "npp"),
        ("libcuda.so.1", "cuda"),
        ("libcurl.so.4", None),
        ("libcups.so.2", None),
        ("libnvme.so.1", None),
    ],
)
def test_nvidias_libraries_are_recognised_by_name(soname, family):
    found = nvidia_library_of_soname(soname)
    assert (found and found.family) == family


CALLS = """
import ctypes
extension = ctypes.CDLL({path!r})
extension.text.restype = ctypes.c_char_p
print(extension.known(), extension.of_a_sibling(), extension.text().decode())
print(*ghost.gaps_reached())
print(extension.unknown(), extension.of_the_driver())
print(*ghost.gaps_reached())
print(ghost.extensions.imported_by["cuMadeUp"])
"""


def test_an_extension_loads_and_missing_functions_fail_when_called(on_ghost, workshop):
    printed = on_ghost(CALLS.format(path=str(workshop.extension())), torch=False).splitlines()
    assert printed == [
        "0 7 not supported by memfit's ghost",
        "nvjpegGetErrorString",
        "9 801",
        "nvjpegGetErrorString nvjpegCreateSimple cuMadeUp",
        "extension.so",
    ]


def test_two_extensions_have_separate_stubs(on_ghost, workshop):
    first = workshop.extension("first.so")
    source = SOURCE.replace("cuMadeUp", "cuAnotherOne")
    second = workshop.extension("second.so", source)
    script = f"""
        import ctypes
        for path in ({str(first)!r}, {str(second)!r}):
            print(ctypes.CDLL(path).of_the_driver())
        print(*ghost.gaps_reached())
    """
    assert on_ghost(script, torch=False).splitlines() == ["801", "801", "cuMadeUp cuAnotherOne"]


def test_the_dry_run_names_the_function_and_the_library(dry_run, workshop):
    path = workshop.extension()
    script = f"""
        import ctypes
        import torch
        extension = ctypes.CDLL({str(path)!r})
        torch.zeros(100, device="cuda")
        extension.unknown()
    """
    run = dry_run(script)
    texts = [note["text"] for note in run.answer["notes"]]
    assert any("nvjpegCreateSimple of extension.so, which the ghost does not" in text for text in texts)
    assert not any("cuMadeUp" in text for text in texts)  # imported, but never called
    provenance = {term["name"]: term["provenance"] for term in run.answer["terms"]}
    assert provenance["allocated"] == "assumed"  # the function might have allocated memory


@pytest.mark.slow
def test_missing_driver_functions_share_one_note(dry_run):
    """A library that contains a CUDA runtime looks up hundreds of them."""
    script = """
        import ctypes
        import torch
        torch.zeros(100, device="cuda")
        found, function = ctypes.c_int(), ctypes.c_void_p()
        for name in (b"cuMadeUp", b"cuMadeUpToo"):
            ctypes.CDLL("libcuda.so.1").cuGetProcAddress_v2(
                name, ctypes.byref(function), 13000, ctypes.c_uint64(0), ctypes.byref(found)
            )
        print("found", found.value, function.value)
    """
    run = dry_run(script)
    assert "found 1 None" in run.out
    (text,) = [note["text"] for note in run.answer["notes"] if "cuMadeUp" in note["text"]]
    assert "functions that the ghost does not have (2 in total; the first was cuMadeUp)" in text


def test_an_imported_extension_module_gets_stubs_too(on_ghost, workshop):
    workshop.extension("extension.so", SOURCE + MODULE)
    script = f"""
        import sys
        sys.path.insert(0, {str(workshop.folder)!r})
        try:
            import extension
        except SystemError as error:
            print(type(error).__name__)
        print(sorted(ghost.extensions.imported_by))
    """
    assert on_ghost(script, torch=False).splitlines() == [
        "SystemError",
        "['cuMadeUp', 'nvjpegCreateSimple', 'nvjpegGetErrorString']",
    ]


@pytest.mark.slow
def test_an_extension_built_for_another_cuda_version_is_not_loaded(dry_run, workshop):
    cudart = workshop.versioned("libcudart.so.12", "int cudaMalloc(void **p, unsigned long n) { return 0; }")
    path = workshop.extension(cudart=cudart)
    script = f"""
        import ctypes
        import torch
        torch.zeros(100, device="cuda")
        ctypes.CDLL({str(path)!r})
    """
    run = dry_run(script)
    assert "OSError: extension.so was not loaded: it needs libcudart.so.12" in run.err
    assert f"Find the package that contains {path}, and install its build for CUDA 13.0." in run.err
    assert any("extension.so was not loaded" in note["text"] for note in run.answer["notes"])


def test_a_process_without_a_ghost_is_unchanged(workshop):
    """Without a loaded ghost there are no stubs, and the loader raises its own error."""
    with pytest.raises(OSError, match=r"libnvjpeg\.so\.13|libcudart\.so\.13|libcuda\.so\.1"):
        ctypes.CDLL(str(workshop.extension()))
