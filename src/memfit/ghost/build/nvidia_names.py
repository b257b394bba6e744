"""Recognise NVIDIA's libraries and functions by name."""

import re
from dataclasses import dataclass

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


def nvidia_library(soname: str) -> NvidiaLibrary | None:
    """Return the NVIDIA library of a SONAME or file name, or None.

    >>> nvidia_library("libcudnn_ops.so.9").family, nvidia_library("libcurl.so.4")
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
