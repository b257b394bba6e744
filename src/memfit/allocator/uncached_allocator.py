"""The allocator with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``: each tensor is a cudaMalloc and a cudaFree.

How much cudaMalloc takes from the device is assumed (``device_memory.py``).
"""

from dataclasses import dataclass

from memfit.allocator.blocks import PoolId
from memfit.allocator.device_memory import DeviceMemory, SimulatedOutOfMemoryError
from memfit.records import DEFAULT_POOL, Segment


@dataclass(slots=True)
class UncachedBlock:
    """The device memory of one tensor."""

    address: int
    size: int


class UncachedAllocator:
    """The part of ``CachingAllocator`` that a replay needs."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.captures = 0
        self.allocated = 0
        """Bytes as requested."""
        self.peak_allocated = 0
        self.peak_reserved = memory.used
        self._before = memory.used

    def malloc(self, size: int, stream: int = 0) -> UncachedBlock:
        """Allocate ``size`` bytes; the stream does not matter.

        Raises:
            SimulatedOutOfMemoryError: the device has too little memory left.
        """
        del stream
        address = self.memory.malloc(size)
        if address is None:
            raise SimulatedOutOfMemoryError(size, self.memory.total - self.memory.used)
        self.allocated += size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.memory.used)
        return UncachedBlock(address, size)

    def free(self, block: UncachedBlock) -> None:
        """Free the memory; cudaFree waits for every stream."""
        self.allocated -= block.size
        self.memory.free(block.address, block.size)

    def record_stream(self, block: UncachedBlock, stream: int) -> None:
        """Do nothing: see ``free``."""

    def stream_is_done(self, stream: int) -> None:
        """Do nothing: see ``free``."""

    def all_streams_are_done(self) -> None:
        """Do nothing: see ``free``."""

    def empty_cache(self, pool_id: PoolId = DEFAULT_POOL) -> None:
        """Do nothing: there is no cache."""

    def begin_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Do nothing: there are no pools."""

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Do nothing: there are no pools."""

    def release_pool(self, pool_id: PoolId) -> None:
        """Do nothing: there are no pools."""

    def memory_stats(self) -> dict[str, int]:
        """Return the peaks, by PyTorch's names; PyTorch itself counts nothing in this mode."""
        return {
            "allocated_bytes.all.peak": self.peak_allocated,
            "reserved_bytes.all.peak": self.peak_reserved - self._before,
        }

    def snapshot(self) -> tuple[Segment, ...]:
        """Return no segments."""
        return ()
