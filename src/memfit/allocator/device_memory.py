"""The device's memory, as PyTorch's allocator asks for it, with nothing behind it.

Addresses are given out as the ghost gives them: in slots of a power of two, aligned to their size, the free
slot of that size first that was freed last. Real drivers place memory otherwise. That matters up to PyTorch
2.11 alone, which chooses among free blocks of equal size by address.
"""

from dataclasses import dataclass, field

from memfit.records import DriverCalls
from memfit.units import MIB, TIB

GRANULE = 2 * MIB
"""For sizes from 1 MiB up cudaMalloc takes whole multiples of this. Assumed: it is documented nowhere."""

_ALIGNMENT = 512
_MALLOC_FROM, _VIRTUAL_FROM = 32 * TIB, 48 * TIB


class SimulatedOutOfMemoryError(Exception):
    """An allocation failed for good; the allocator is as it was, but for what it gave back on the way."""

    def __init__(self, size: int, free: int) -> None:
        super().__init__(f"{size:,} bytes cannot be allocated: the device has {free:,} left.")
        self.size = size
        """Bytes as requested."""
        self.free = free
        """Bytes that the device has left."""


@dataclass(slots=True)
class DeviceMemory:
    """Bytes of a device and who has them.

    >>> memory = DeviceMemory(total=80 << 30)
    >>> address = memory.malloc(20 * MIB)
    >>> memory.used, memory.calls.malloc
    (20971520, 1)
    """

    total: int
    """Bytes, as cudaMemGetInfo reports them."""
    used: int = 0
    """Bytes taken: by the context and other processes to begin with."""
    most: int = 0
    """Bytes that were taken at once, at most."""
    calls: DriverCalls = field(default_factory=DriverCalls)
    _malloc: "_AddressSlots" = field(default_factory=lambda: _AddressSlots(_MALLOC_FROM))
    _virtual: "_AddressSlots" = field(default_factory=lambda: _AddressSlots(_VIRTUAL_FROM))

    def malloc(self, size: int) -> int:
        """Return the address of ``size`` bytes from cudaMalloc; 0 if there are not so many left."""
        self.calls.malloc += 1
        taken = _taken(size)
        if taken > self.total - self.used:
            return 0
        self._take(taken)
        return self._malloc.take(size)

    def free(self, address: int, size: int) -> None:
        """Give memory from ``malloc`` back."""
        self.calls.free += 1
        self.used -= _taken(size)
        self._malloc.give(address, size)

    def reserve(self, size: int) -> int:
        """Return the address of ``size`` bytes of addresses with no memory behind them."""
        return self._virtual.take(size)

    def unreserve(self, address: int, size: int) -> None:
        """Give addresses from ``reserve`` back."""
        self._virtual.give(address, size)

    def map(self, pieces: int, size: int) -> bool:
        """Put pieces of ``size`` bytes each behind addresses; False, and none, if there is less left."""
        if pieces * size > self.total - self.used:
            return False
        self.calls.map += pieces
        self._take(pieces * size)
        return True

    def _take(self, size: int) -> None:
        self.used += size
        self.most = max(self.most, self.used)

    def unmap(self, pieces: int, size: int) -> None:
        """Give memory behind addresses back; PyTorch waits for the stream first."""
        self.calls.synchronize += 1
        self.calls.unmap += pieces
        self.used -= pieces * size


class _AddressSlots:
    """Addresses in slots."""

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


def _taken(size: int) -> int:
    granule = GRANULE if size >= MIB else _ALIGNMENT
    return -(-size // granule) * granule
