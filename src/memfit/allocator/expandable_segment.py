"""One expandable segment: a reserved range of addresses, and the handles mapped into it.

Source: ``ExpandableSegment``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
"""

from memfit.allocator.device_memory import DeviceMemory


class ExpandableSegment:
    """A reservation and its handles: pieces of memory of one size."""

    __slots__ = ("_memory", "address", "handle", "size")

    def __init__(self, memory: DeviceMemory, handle: int) -> None:
        self._memory = memory
        self.handle = handle
        """Bytes of each."""
        self.size = -(-(memory.total + memory.total // 8) // handle) * handle
        self.address = memory.reserve(self.size)

    def map(self, size: int) -> int:
        """Put memory behind ``size`` bytes that begin with a handle, rounded up to whole handles.

        Returns:
            The bytes that have memory now; 0 if the device has not so much left.
        """
        pieces = -(-size // self.handle)
        return pieces * self.handle if self._memory.map(pieces, self.handle) else 0

    def unmap(self, address: int, size: int) -> tuple[int, int]:
        """Give back the handles that lie wholly within ``[address, address + size)``.

        Returns:
            Where they begin, and their bytes; 0 bytes if there are none.
        """
        begin = -(-(address - self.address) // self.handle)
        end = (address + size - self.address) // self.handle
        if begin >= end:
            return address, 0
        self._memory.unmap(end - begin, self.handle)
        return self.address + begin * self.handle, (end - begin) * self.handle

    def release(self) -> None:
        """Give the addresses back."""
        self._memory.unreserve(self.address, self.size)
