"""Find this machine's GPU through its driver: whether there is one, which model, and whether it is real.

Uses neither torch nor a CUDA context, so it takes no memory on the card.
"""

import ctypes
import os
from dataclasses import dataclass

from memfit.card.nvml import NvmlLibrary
from memfit.errors import UnsuitableEnvironmentError

_SUCCESS = 0
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_TEXT = 256
_ELSEWHERE = "Use a machine with a GPU, or memfit dry-run, which needs no GPU."


@dataclass(frozen=True, slots=True)
class Card:
    """The first GPU that CUDA shows this process."""

    name: str
    """As the driver names it: "NVIDIA H200"."""
    driver: str
    """The driver's version ("580.95.05"); empty without NVML."""
    cuda: str
    """The newest CUDA version that the driver supports: "13.0"."""
    rehearsal: bool
    """Whether memfit's ghost stands in for the card, so that nothing read from it is a measurement."""


def detect_card(purpose: str) -> Card:
    """Find the GPU that CUDA code of this process would use.

    Raises:
        UnsuitableEnvironmentError: there is no driver or no GPU, or CUDA_VISIBLE_DEVICES hides it.
    """
    count, version, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_TEXT)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        raise _no_card(purpose, "no NVIDIA driver (libcuda.so.1) was found", _ELSEWHERE) from None
    if (status == _NO_DEVICE or not count.value) and "CUDA_VISIBLE_DEVICES" in os.environ:
        shown = os.environ["CUDA_VISIBLE_DEVICES"]
        raise _no_card(
            purpose,
            f"CUDA_VISIBLE_DEVICES={shown!r} selects no GPU on this machine",
            "Change or unset it, or use memfit dry-run, which needs no GPU.",
        )
    if status not in (_SUCCESS, _NO_DEVICE):
        raise _no_card(
            purpose,
            f"the NVIDIA driver failed to initialize (CUDA error {status})",
            f"Check the driver with nvidia-smi. {_ELSEWHERE}",
        )
    if not count.value:
        raise _no_card(purpose, "the NVIDIA driver finds no GPU", _ELSEWHERE)
    cuda.cuDeviceGetName(name, _TEXT, 0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    nvml = NvmlLibrary.open()
    return Card(
        name=name.value.decode(errors="replace"),
        driver=nvml.driver_version() if nvml else "",
        cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        rehearsal=is_ghost_loaded(),
    )


def pci_bus_id(device: int = 0) -> str:
    """Return a GPU's PCI bus id; an empty string if the driver does not report it.

    Call it only when CUDA is already initialised: a process that initialises CUDA can no longer fork.
    """
    text = ctypes.create_string_buffer(_TEXT)
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(text, _TEXT, device)
    return text.value.decode() if status == _SUCCESS else ""


def is_ghost_loaded() -> bool:
    """Return whether the ghost is loaded in this process: it exports a function of its own."""
    return hasattr(ctypes.CDLL(None), "ghost_configure")


def _no_card(purpose: str, why: str, remedy: str) -> UnsuitableEnvironmentError:
    return UnsuitableEnvironmentError(f"Cannot {purpose} without a GPU: {why}. {remedy}")
