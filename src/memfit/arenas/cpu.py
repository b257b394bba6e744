"""An arena's memory for CPU tensors."""

import ctypes
import os
import platform
import sys
from pathlib import Path

import torch

from memfit.arenas.native import load
from memfit.errors import UnsuitableEnvironmentError
from memfit.packing.lifetimes import CPU_ALIGNMENT
from memfit.records import DeviceUse, Figure, MachineKind, Provenance, Term
from memfit.units import KIB

_LIBRARY = b"libc10.so"


class CpuMemory:
    """CPU memory: PyTorch's allocations in this process are routed through ``c/cpu_allocator.c``."""

    name = "cpu"
    alignment = CPU_ALIGNMENT

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

    def device(self) -> DeviceUse:
        """Describe this machine's memory."""
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        nothing = Figure(0, Provenance.EXACT, "a CPU has no context")
        return DeviceUse("CPU", Figure(size, Provenance.MEASURED, "sysconf"), nothing, 0, MachineKind.CPU)

    def release_unused(self) -> None:
        """Return the arena's memory to the system, if no tensor is left in it."""
        load().cpu_trim()

    def detach(self) -> None:
        """Stop routing allocations through the arena, unless a tensor is left in it."""
        load().cpu_detach()
