"""One expandable segment: a reserved range of addresses, and the handles mapped into it.

Source: ``ExpandableSegment``, c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
"""

from support.reference_allocator.device_memory import DeviceMemory


class ExpandableSegment:
    """A reserved range of addresses, and handles of one size mapped into it."""

    __slots__ = ("_memory", "address", "handle", "size")

    def __init__(self, memory: DeviceMemory, handle: int) -> None:
        self._memory = memory
        self.handle = handle
        """Bytes of a handle."""
        self.size = -(-(memory.total + memory.total // 8) // handle) * handle
        self.address = memory.reserve(self.size)

    def map(self, size: int) -> int:
        """Map memory for ``size`` bytes, rounded up to whole handles.

        Returns:
            The bytes mapped; 0 if the device has too few left.
        """
        handles = -(-size // self.handle)
        return handles * self.handle if self._memory.map(handles, self.handle) else 0

    def unmap(self, address: int, size: int) -> tuple[int, int]:
        """Unmap the handles that lie entirely within ``[address, address + size)``.

        Returns:
            The address of the first and the bytes of all; 0 bytes if there is no such handle.
        """
        begin = -(-(address - self.address) // self.handle)
        end = (address + size - self.address) // self.handle
        if begin >= end:
            return address, 0
        self._memory.unmap(end - begin, self.handle)
        return self.address + begin * self.handle, (end - begin) * self.handle

    def release(self) -> None:
        """Release the range of addresses."""
        self._memory.unreserve(self.address, self.size)
