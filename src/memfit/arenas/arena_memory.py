"""An arena's memory: for CPU tensors, and for CUDA tensors."""

import ctypes
import functools
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from memfit.arenas.arena_library import gpu_bytes_by_use, load
from memfit.errors import UnsuitableEnvironmentError, UsageError
from memfit.packing.allocation_lifetimes import ALIGNMENT, CPU_ALIGNMENT
from memfit.records import Figure, Provenance, Term
from memfit.units import KIB
from memfit.user_lines import warn_user

_LIBRARY = b"libc10.so"


class CpuArenaMemory:
    """CPU memory: PyTorch's allocations in this process are routed through ``c/cpu_allocator.c``."""

    name = "cpu"
    """The type of its ``torch.device``."""
    alignment = CPU_ALIGNMENT
    """Offsets are multiples of this many bytes."""
    arena: int
    """Pointer to the arena in C."""

    def __init__(self) -> None:
        machine = f"{sys.platform} on {platform.machine()}"
        if machine != "linux on x86_64":
            raise UnsuitableEnvironmentError(
                f"memfit.arena can place CPU tensors only on x86-64 Linux; this machine is {machine}. "
                "Run the script without the arena; the results will be the same."
            )
        self.arena = load().cpu_attach(_LIBRARY)
        if not self.arena:
            raise UnsuitableEnvironmentError(
                "memfit.arena cannot place CPU tensors in this process. Either the process cannot reserve 4 "
                f"TiB of address space (see ulimit -v), or libc10.so of PyTorch {torch.__version__} does not "
                "use posix_memalign() and free() for CPU memory. Run the script without the arena; the "
                "results will be the same."
            )
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc; musl has none

    def reserve(self, size: int) -> bool:
        """Grow the arena to this size, and release the heap memory that earlier steps left unused."""
        if self._trim is not None:
            self._trim(0)
        return bool(load().cpu_reserve(size))

    def lane(self) -> int:
        """Return the lane of this thread."""
        return int(load().cpu_lane())

    def settings(self) -> dict[str, str]:
        """Return the settings that decide how much scratch memory operations request."""
        return {
            "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
            "threads": str(torch.get_num_threads()),
            "mkldnn": str(torch.backends.mkldnn.enabled),
        }

    def used(self) -> tuple[Term, ...]:
        """Measure the resident memory of this process, now and at its peak."""
        found = {}
        for line in Path("/proc/self/status").read_text("ascii").splitlines():
            name, _, rest = line.partition(":")
            if name in {"VmRSS", "VmHWM"}:
                found[name] = int(rest.split()[0]) * KIB
        return tuple(
            Term(name, Figure(found[source], Provenance.MEASURED, f"{source} in /proc/self/status"))
            for name, source in (("process now", "VmRSS"), ("process at its peak", "VmHWM"))
        )

    def release_unused(self) -> None:
        """Return the arena's memory to the system, if no tensor is left in it."""
        load().cpu_trim()

    def detach(self) -> None:
        """Stop routing allocations through the arena, unless a tensor is left in it."""
        load().cpu_detach()


_BENCHMARK = (
    "memfit.arena: torch.backends.cudnn.benchmark is on, but PyTorch can time convolutions only with its own "
    "allocator. Convolutions will raise an error about cacheInfo. Set torch.backends.cudnn.benchmark = False."
)


class CudaArenaMemory:
    """CUDA memory: ``c/cuda_allocator.c`` replaces PyTorch's allocator in this process.

    Raises:
        UsageError: CUDA is already in use.
        UnsuitableEnvironmentError: this PyTorch is built without CUDA, or there is no GPU.
    """

    name = "cuda"
    alignment = ALIGNMENT
    arena: int

    def __init__(self) -> None:
        _route()
        self._index = 0
        self._has_warned = False
        self.arena = self._attach()

    def reserve(self, size: int) -> bool:
        """Grow the arena to this size from memory that earlier steps left unused; release the rest."""
        is_there = bool(load().cuda_reserve(size))
        load().cuda_trim()
        return is_there

    def lane(self) -> int:
        """Return the lane of the current stream of the current device.

        Raises:
            UsageError: the arena's memory is on another device.
        """
        if torch.backends.cudnn.benchmark and not self._has_warned:
            self._has_warned = True
            warn_user(_BENCHMARK)
        current = torch.cuda.current_device()
        if current != self._index:
            self._index = current
            self._attach()
        return int(torch.cuda.current_stream().cuda_stream)

    def settings(self) -> dict[str, str]:
        """Return the settings that decide how much scratch memory operations request."""
        gpu, cudnn = torch.cuda.get_device_properties(self._index), torch.backends.cudnn
        return {
            "device": f"{gpu.name} {gpu.major}.{gpu.minor}",
            "cudnn": f"{cudnn.version()} {cudnn.enabled}",  # type: ignore[no-untyped-call]
            "cudnn.benchmark": str(cudnn.benchmark),
            "cudnn.deterministic": str(cudnn.deterministic),
            "tf32": _precisions(),
        }

    def used(self) -> tuple[Term, ...]:
        """Return how much GPU memory is mapped, now and at its peak."""
        count = self._count()
        rule = "pages that the driver has mapped for this process"
        return (
            Term("GPU memory now", Figure(count["pages"], Provenance.EXACT, rule)),
            Term("GPU memory at its peak", Figure(count["most_pages"], Provenance.EXACT, rule)),
        )

    def release_unused(self) -> None:
        """Release the pages of the arena that hold no tensor."""
        load().cuda_lend()

    def detach(self) -> None:
        """Do nothing: PyTorch keeps an allocator in use. Between steps, no allocation is placed."""

    def _count(self) -> dict[str, int]:
        return gpu_bytes_by_use(self._index)

    def _attach(self) -> int:
        found = load().cuda_attach(self._index)
        if not found:
            raise UsageError(
                f"This step runs on cuda:{self._index}, but memfit.arena's memory is on another GPU. "
                "Run one process per GPU, or choose the device before the first step."
            )
        return int(found)


ArenaMemory = CpuArenaMemory | CudaArenaMemory
"""The memory that an arena places allocations in."""


def _precisions() -> str:
    """Return the precisions that float32 operations may use, whichever API set them."""
    cudnn = torch.backends.cudnn
    backends = (torch.backends.cuda.matmul, *(getattr(cudnn, name, None) for name in ("conv", "rnn")))
    return " ".join(getattr(backend, "fp32_precision", "") for backend in backends)


@functools.cache
def _route() -> Any:
    """Replace PyTorch's allocator with the library, for good; return the object that must stay alive."""
    if torch.version.cuda is None:
        raise UnsuitableEnvironmentError(
            f"memfit.arena cannot place CUDA tensors: PyTorch {torch.__version__} is built without CUDA. "
            "Install the CUDA build, or pass device='cpu'."
        )
    library = load()
    pluggable: Any = torch._C._cuda_customAllocator(
        _address(library.placing_malloc), _address(library.placing_free)
    )
    pluggable.set_record_stream_fn(_address(library.placing_record_stream))
    pluggable.set_reset_fn(_address(library.cuda_trim))
    pluggable.set_memory_fraction_fn(_address(library.placing_set_fraction))
    pluggable.set_begin_allocate_to_pool(_address(library.placing_begin_pool))
    pluggable.set_end_allocate_to_pool_fn(_address(library.placing_end_pool))
    pluggable.set_release_pool(_address(library.placing_release_pool))
    if not library.cuda_attach(0):
        raise UnsuitableEnvironmentError(
            f"memfit.arena cannot find the CUDA functions it needs (PyTorch {torch.__version__}). The arena "
            "needs CUDA 12 or newer. Run the script without the arena; the results will be the same."
        )
    try:
        torch._C._cuda_changeCurrentAllocator(pluggable)
    except RuntimeError as error:
        raise UsageError(
            f"memfit.arena was created too late: CUDA is already in use ({str(error).splitlines()[0]}). "
            "Create the arena at the start of the script, before anything is moved to the GPU."
        ) from None
    return pluggable


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
