"""The GPU of this machine, asked through its driver: is there one, what is it, and is it real?

No torch, and no context: looking costs the card nothing.
"""

import ctypes
import os
from dataclasses import dataclass

from memfit.card.nvml import Nvml
from memfit.errors import UnsuitableEnvironmentError

_SUCCESS = 0
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_TEXT = 256


@dataclass(frozen=True, slots=True)
class Card:
    """The first GPU that CUDA shows this process."""

    name: str
    """As the driver names it: "NVIDIA H200"."""
    driver: str
    """The driver's version ("580.95.05"); empty where NVML is not there to say it."""
    cuda: str
    """The newest CUDA that the driver serves: "13.0"."""
    rehearsal: bool
    """Whether memfit's ghost stands in its place: then nothing here is a measurement."""


def find_card(purpose: str) -> Card:
    """Find the GPU that CUDA code of this process would use.

    Args:
        purpose: what it is for, as the refusal begins: "record train.py".

    Raises:
        UnsuitableEnvironmentError: there is no driver or no GPU, or CUDA_VISIBLE_DEVICES hides it.
    """
    count, version, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(_TEXT)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
    except (OSError, AttributeError):
        raise _no_card(purpose, "there is no NVIDIA driver (libcuda.so.1)") from None
    if (status == _NO_DEVICE or not count.value) and "CUDA_VISIBLE_DEVICES" in os.environ:
        shown = os.environ["CUDA_VISIBLE_DEVICES"]
        raise _no_card(purpose, f"CUDA_VISIBLE_DEVICES={shown!r} shows none that is there")
    if status not in (_SUCCESS, _NO_DEVICE):
        raise _no_card(purpose, f"the NVIDIA driver does not start (CUDA error {status}; see nvidia-smi)")
    if not count.value:
        raise _no_card(purpose, "the NVIDIA driver finds none")
    cuda.cuDeviceGetName(name, _TEXT, 0)
    cuda.cuDriverGetVersion(ctypes.byref(version))
    nvml = Nvml.open()
    return Card(
        name=name.value.decode(errors="replace"),
        driver=nvml.driver_version() if nvml else "",
        cuda=f"{version.value // 1000}.{version.value % 1000 // 10}",
        rehearsal=is_rehearsal(),
    )


def bus_id(device: int = 0) -> str:
    """Return where a GPU is on the bus; an empty string if the driver does not say.

    Call it when CUDA is initialised already: a process that initialises it may not fork any more.
    """
    text = ctypes.create_string_buffer(_TEXT)
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetPCIBusId(text, _TEXT, device)
    return text.value.decode() if status == _SUCCESS else ""


def is_rehearsal() -> bool:
    """Whether the ghost is loaded in this process: its own functions are there for everyone to see."""
    return hasattr(ctypes.CDLL(None), "ghost_configure")


def _no_card(purpose: str, why: str) -> UnsuitableEnvironmentError:
    return UnsuitableEnvironmentError(
        f"Cannot {purpose}: no GPU can be used here: {why}. "
        "Run it on a machine with a GPU, or without one on the ghost: memfit dry-run."
    )
