"""An arena for CUDA tensors."""

import ctypes
import functools
import warnings
from typing import Any

import torch

from memfit.arenas.native import counted, load
from memfit.card.find import is_rehearsal
from memfit.errors import UnsuitableEnvironmentError, UsageError
from memfit.packing.lifetimes import ALIGNMENT
from memfit.records import DeviceUse, Figure, Machine, Provenance, Term

_BENCHMARK = (
    "memfit.arena: torch.backends.cudnn.benchmark is on, and PyTorch cannot time convolutions with another "
    "allocator than its own: they will raise (cacheInfo). Turn it off."
)


class Cuda:
    """The CUDA allocations of this process, routed through ``c/cuda_allocator.c``.

    Raises:
        UsageError: CUDA is in use already.
        UnsuitableEnvironmentError: this is no CUDA build of PyTorch, or there is no GPU.
    """

    name = "cuda"
    alignment = ALIGNMENT

    def __init__(self) -> None:
        _route()
        self._index = 0
        self._has_warned = False
        self.arena = self._attach()

    def reserve(self, size: int) -> bool:
        """Make the arena that large, of memory that steps without it have left; the rest is given back."""
        is_there = bool(load().cuda_reserve(size))
        load().cuda_trim()
        return is_there

    def lane(self) -> int:
        """Return whose step it is: the current stream's of the current device.

        Raises:
            UsageError: the arena has memory of another device.
        """
        if torch.backends.cudnn.benchmark and not self._has_warned:
            self._has_warned = True
            warnings.warn(_BENCHMARK, stacklevel=5)
        current = torch.cuda.current_device()
        if current != self._index:
            self._index = current
            self._attach()
        return int(torch.cuda.current_stream().cuda_stream)

    def settings(self) -> dict[str, str]:
        """Return what decides how much scratch memory is asked for."""
        seen, cudnn = torch.cuda.get_device_properties(self._index), torch.backends.cudnn
        return {
            "device": f"{seen.name} {seen.major}.{seen.minor}",
            "cudnn": f"{cudnn.version()} {cudnn.enabled}",  # type: ignore[no-untyped-call]
            "cudnn.benchmark": str(cudnn.benchmark),
            "cudnn.deterministic": str(cudnn.deterministic),
            "tf32": _precisions(),
        }

    def used(self) -> tuple[Term, ...]:
        """Measure what of the GPU is mapped, and was at most."""
        count = self._count()
        rule = "pages that the driver gave and that are not given back"
        return (
            Term("GPU memory now", Figure(count["pages"], Provenance.EXACT, rule)),
            Term("GPU memory at its peak", Figure(count["most_pages"], Provenance.EXACT, rule)),
        )

    def device(self) -> DeviceUse:
        """Return whose memory it is: the GPU's."""
        rehearsal = is_rehearsal()
        sure = Provenance.ASSUMED if rehearsal else Provenance.MEASURED
        free, total = torch.cuda.mem_get_info(self._index)
        outside = total - free - self._count()["pages"]
        return DeviceUse(
            torch.cuda.get_device_name(self._index),
            Figure(total, sure, "rehearsal: the ghost's" if rehearsal else "cudaMemGetInfo"),
            Figure(
                outside,
                Provenance.ASSUMED,
                "all that is in use, also by others, less what is mapped here",
            ),
            0,
            Machine.REHEARSAL if rehearsal else Machine.CARD,
        )

    def lend(self) -> None:
        """Give back the arena's memory that nothing lives on."""
        load().cuda_lend()

    def detach(self) -> None:
        """Do nothing: PyTorch keeps an allocator that has been used. Nothing is placed between steps."""

    def _count(self) -> dict[str, int]:
        return counted(self._index)

    def _attach(self) -> int:
        found = load().cuda_attach(self._index)
        if not found:
            raise UsageError(
                f"memfit.arena has its memory on another GPU, and this step is cuda:{self._index}'s. "
                "Run one process for each GPU, or choose the device before the first step."
            )
        return int(found)


def _precisions() -> str:
    """Return which precisions float32 may be computed in, however they were set."""
    cudnn = torch.backends.cudnn
    backends = (torch.backends.cuda.matmul, *(getattr(cudnn, name, None) for name in ("conv", "rnn")))
    return " ".join(getattr(backend, "fp32_precision", "") for backend in backends)


@functools.cache
def _route() -> Any:
    """Put the library in the place of PyTorch's allocator, for good; return what has to be kept for that."""
    if torch.version.cuda is None:
        raise UnsuitableEnvironmentError(
            f"memfit.arena cannot place CUDA tensors: PyTorch {torch.__version__} is built without CUDA. "
            "Install the CUDA build, or say device='cpu'."
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
            f"memfit.arena does not find CUDA's functions in this process (PyTorch {torch.__version__}). "
            "They are CUDA 12's or newer. Leave the arena out: the script runs the same without."
        )
    try:
        torch._C._cuda_changeCurrentAllocator(pluggable)
    except RuntimeError as error:
        raise UsageError(
            f"memfit.arena comes too late: CUDA is in use already ({str(error).splitlines()[0]}). Make the "
            "arena first in the script, before anything is moved to the GPU."
        ) from None
    return pluggable


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
