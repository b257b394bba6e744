"""An arena for CPU tensors."""

import ctypes
import os
import platform
import sys
from pathlib import Path

import torch

from memfit.arenas.native import load
from memfit.errors import UnsuitableEnvironmentError
from memfit.packing.lifetimes import CPU_ALIGNMENT
from memfit.records import DeviceUse, Figure, Machine, Provenance, Term
from memfit.units import KIB

_LIBRARY = b"libc10.so"


class Cpu:
    """The CPU allocations of this process, routed through ``c/cpu_allocator.c``."""

    name = "cpu"
    alignment = CPU_ALIGNMENT

    def __init__(self) -> None:
        machine = f"{sys.platform} on {platform.machine()}"
        if machine != "linux on x86_64":
            raise UnsuitableEnvironmentError(
                f"memfit.arena places CPU tensors on Linux on x86-64; this is {machine}. "
                "Leave the arena out: the script runs the same without."
            )
        self.arena = load().cpu_attach(_LIBRARY)
        if not self.arena:
            raise UnsuitableEnvironmentError(
                f"memfit.arena does not find where PyTorch {torch.__version__} asks for CPU memory "
                "(posix_memalign and free in libc10.so), or may not reserve 4 TiB of addresses for it "
                "(ulimit -v). Leave the arena out: the script runs the same without."
            )
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's, not musl's

    def reserve(self, size: int) -> bool:
        """Make the arena that large, and give the system back what steps without it have left in the heap."""
        if self._trim is not None:
            self._trim(0)
        return bool(load().cpu_reserve(size))

    def lane(self) -> int:
        """Return whose step it is: this thread's."""
        return int(load().cpu_lane())

    def settings(self) -> dict[str, str]:
        """Return what decides how much scratch memory is asked for."""
        return {
            "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
            "threads": str(torch.get_num_threads()),
            "mkldnn": str(torch.backends.mkldnn.enabled),
        }

    def used(self) -> tuple[Term, ...]:
        """Measure what this process has in memory, and had at most."""
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
        """Return whose memory it is: this machine's."""
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        nothing = Figure(0, Provenance.EXACT, "a CPU has no context")
        return DeviceUse("CPU", Figure(size, Provenance.MEASURED, "sysconf"), nothing, 0, Machine.CPU)

    def lend(self) -> None:
        """Give the arena's memory back to the system, if nothing lives there."""
        load().cpu_trim()

    def detach(self) -> None:
        """Route nothing new through here, unless something still lives in the arena."""
        load().cpu_detach()
