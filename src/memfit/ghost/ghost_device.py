"""The device that the ghost stands in for, as the runtime is configured with it and as a script sees it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from memfit.devices import Device
from memfit.patching.patches import Patch


@dataclass(frozen=True, slots=True)
class GhostDevice:
    """The device that the ghost reports; the fields of ``struct ghost_device``, in bytes if not named."""

    name: str
    major: int
    """Of the compute capability."""
    minor: int
    multiprocessors: int
    threads_per_multiprocessor: int
    blocks_per_multiprocessor: int
    total_bytes: int
    """The capacity, as ``torch.cuda.mem_get_info`` reports it."""
    shared_per_block: int
    shared_per_block_optin: int
    shared_per_multiprocessor: int
    l2_bytes: int
    memory_bus_bits: int
    clock_khz: int
    memory_clock_khz: int

    @classmethod
    def of(cls, device: Device, total_bytes: int | None = None) -> Self:
        """Return the ghost device for a device of the table, with ``total_bytes`` of memory if given.

        >>> from memfit.devices import find_device
        >>> GhostDevice.of(find_device("RTX 4090"), total_bytes=8 << 30).total_bytes
        8589934592
        """
        major, minor = device.compute_capability
        return cls(
            name=device.reported_as,
            major=major,
            minor=minor,
            multiprocessors=device.multiprocessors,
            threads_per_multiprocessor=device.max_threads_per_multiprocessor,
            blocks_per_multiprocessor=device.max_blocks_per_multiprocessor,
            total_bytes=device.total_bytes if total_bytes is None else total_bytes,
            shared_per_block=device.shared_memory_per_block,
            shared_per_block_optin=device.shared_memory_per_block_optin,
            shared_per_multiprocessor=device.shared_memory_per_multiprocessor,
            l2_bytes=device.l2_cache,
            memory_bus_bits=device.memory_bus_width,
            clock_khz=device.clock // 1000,
            memory_clock_khz=device.memory_clock // 1000,
        )


_FREE = Patch("torch.cuda.memory", "mem_get_info", also="torch.cuda", why="report a smaller card")
_TOTAL = Patch("torch._C:_CudaDeviceProperties", "total_memory", why="report a smaller card")


def show_memory(total: int) -> None:
    """Have PyTorch's Python functions report a device of so many bytes, and what is free of them.

    A script may choose its batch or its caches by it. PyTorch's C++ code still sees all that the ghost has:
    ``set_per_process_memory_fraction`` takes its share of that.
    """

    def mem_get_info(original: Callable[[Any], tuple[int, int]], device: Any = None) -> tuple[int, int]:
        free, all_memory = original(device)
        return max(total - (all_memory - free), 0), total

    _FREE.wrap("mem_get_info", mem_get_info)
    _TOTAL.install("total_memory", lambda _: property(lambda _: total))
