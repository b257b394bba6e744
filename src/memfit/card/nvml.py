"""NVML, NVIDIA's monitoring library: how much of a card's memory is used, and by which process.

Called through ctypes; libnvidia-ml.so.1 comes with the driver. Where NVML is missing (some
containers) or refuses (WSL), results are None or empty and the caller reports that.

Source of the layouts: nvml.h, CUDA 12 and 13: nvmlMemory_t, nvmlProcessInfo_v2_t.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

_SUCCESS = 0
_NOT_AVAILABLE = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE: Windows does not report a process's bytes
_TEXT = 96  # NVML_SYSTEM_DRIVER_VERSION_BUFFER_SIZE is 80
_MOST_PROCESSES = 1024


class _MemoryInfo(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _ProcessInfo(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True, slots=True)
class CardMemoryUse:
    """The memory in use on a card at one moment. Bytes."""

    used: int
    """By all processes, and by the driver itself."""
    processes: Mapping[int, int]
    """By each compute process, keyed by its process id on the host."""


class NvmlLibrary:
    """The loaded library; created by ``open``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @classmethod
    def open(cls) -> Self | None:
        """Load NVML; None where it is missing or does not start."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            started = library.nvmlInit_v2() == _SUCCESS
        except (OSError, AttributeError):
            return None
        return cls(library) if started else None

    def driver_version(self) -> str:
        """Return the driver's version ("580.95.05"), or an empty string."""
        text = ctypes.create_string_buffer(_TEXT)
        return text.value.decode() if self._call("nvmlSystemGetDriverVersion", text, _TEXT) else ""

    def usage(self) -> dict[int, CardMemoryUse]:
        """Return the usage of every card, by NVML's index; cards that return an error are left out."""
        count = ctypes.c_uint()
        if not self._call("nvmlDeviceGetCount_v2", ctypes.byref(count)):
            return {}
        usages = ((index, self._usage(index)) for index in range(count.value))
        return {index: usage for index, usage in usages if usage is not None}

    def index_of(self, bus_id: str) -> int | None:
        """Return the index of the card with a PCI bus id ("0000:01:00.0"), or None."""
        handle, index = ctypes.c_void_p(), ctypes.c_uint()
        found = self._call(
            "nvmlDeviceGetHandleByPciBusId_v2", bus_id.encode(), ctypes.byref(handle)
        ) and self._call("nvmlDeviceGetIndex", handle, ctypes.byref(index))
        return index.value if found else None

    def _usage(self, index: int) -> CardMemoryUse | None:
        handle, memory, count = ctypes.c_void_p(), _MemoryInfo(), ctypes.c_uint(_MOST_PROCESSES)
        processes = (_ProcessInfo * _MOST_PROCESSES)()
        known = self._call("nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(handle)) and self._call(
            "nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory)
        )
        if not known:
            return None
        if not self._call("nvmlDeviceGetComputeRunningProcesses_v3", handle, ctypes.byref(count), processes):
            count.value = 0
        held = {process.pid: process.used for process in processes[: count.value]}
        return CardMemoryUse(memory.used, {pid: used for pid, used in held.items() if used != _NOT_AVAILABLE})

    def _call(self, name: str, *arguments: object) -> bool:
        """Call a function; return False if it fails, or if this driver does not have it."""
        try:
            function = getattr(self._library, name)
        except AttributeError:
            return False
        return bool(function(*arguments) == _SUCCESS)
