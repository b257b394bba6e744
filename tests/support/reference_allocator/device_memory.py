"""A simulated device's memory: byte counts and addresses, with nothing behind them.

Addresses follow the ghost's rule: slots of a power of two, aligned to their size; the slot of a size that was
freed last is reused first. Real drivers place memory differently, which matters only up to PyTorch 2.11: it
chooses among free blocks of equal size by address.
"""

from dataclasses import dataclass, field

from memfit.allocator.block_and_segment_sizes import device_bytes_of_cuda_malloc
from memfit.records import DriverCalls
from memfit.units import TIB

_ALIGNMENT = 512
_MALLOC_FROM, _VIRTUAL_FROM = 32 * TIB, 48 * TIB


class SimulatedOutOfMemoryError(Exception):
    """An allocation failed for good; apart from the cache it released, the allocator is unchanged."""

    def __init__(self, size: int, free: int) -> None:
        super().__init__(f"Cannot allocate {size:,} bytes: the device has {free:,} bytes left.")
        self.size = size
        """Bytes as requested."""
        self.free = free
        """Bytes that the device has left."""


@dataclass(slots=True)
class DeviceMemory:
    """Bytes of a device: how many there are, and how many are in use.

    >>> memory = DeviceMemory(total=80 << 30)
    >>> address = memory.malloc(20 * MIB)
    >>> memory.used, memory.calls.malloc
    (20971520, 1)
    """

    total: int
    """Bytes, as cudaMemGetInfo reports them."""
    used: int = 0
    """Bytes in use; initially by the context and other processes."""
    most: int = 0
    """The most bytes in use at once."""
    calls: DriverCalls = field(default_factory=DriverCalls)
    _malloc: "_AddressSlots" = field(default_factory=lambda: _AddressSlots(_MALLOC_FROM))
    _virtual: "_AddressSlots" = field(default_factory=lambda: _AddressSlots(_VIRTUAL_FROM))

    def malloc(self, size: int) -> int | None:
        """Return the address of ``size`` bytes from cudaMalloc; None if too few are left."""
        self.calls.malloc += 1
        taken = device_bytes_of_cuda_malloc(size)
        if taken > self.total - self.used:
            return None
        self._take(taken)
        return self._malloc.take(size)

    def free(self, address: int, size: int) -> None:
        """Free memory from ``malloc``."""
        self.calls.free += 1
        self.used -= device_bytes_of_cuda_malloc(size)
        self._malloc.give(address, size)

    def reserve(self, size: int) -> int:
        """Reserve a range of ``size`` bytes with no memory behind it; return its address."""
        return self._virtual.take(size)

    def unreserve(self, address: int, size: int) -> None:
        """Release a range from ``reserve``."""
        self._virtual.give(address, size)

    def map(self, count: int, size: int) -> bool:
        """Map ``count`` handles of ``size`` bytes each; return False and map none if too little is left."""
        if count * size > self.total - self.used:
            return False
        self.calls.map += count
        self._take(count * size)
        return True

    def _take(self, size: int) -> None:
        self.used += size
        self.most = max(self.most, self.used)

    def unmap(self, count: int, size: int) -> None:
        """Unmap and release ``count`` handles; PyTorch waits for the stream first."""
        self.calls.synchronize += 1
        self.calls.unmap += count
        self.used -= count * size


class _AddressSlots:
    """Addresses, in slots of a power of two."""

    __slots__ = ("_free", "_next")

    def __init__(self, begin: int) -> None:
        self._next = begin
        self._free: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        slot = _slot(size)
        free = self._free.get(slot)
        if free:
            return free.pop()
        address = -(-self._next // slot) * slot
        self._next = address + slot
        return address

    def give(self, address: int, size: int) -> None:
        self._free.setdefault(_slot(size), []).append(address)


def _slot(size: int) -> int:
    return max(_ALIGNMENT, 1 << (size - 1).bit_length())
