"""The device that the ghost stands in for, as the runtime is configured with it."""

from dataclasses import dataclass
from typing import Self

from memfit.devices import Device


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
