"""The allocator with ``PYTORCH_NO_CUDA_MEMORY_CACHING=1``: each tensor is a cudaMalloc and a cudaFree."""

from copy import copy

from memfit.allocator.requests import RequestKind, Requests
from memfit.allocator.rounding import bytes_taken
from memfit.records import DriverCalls, FailedMalloc, Replay

_MALLOC, _FAILED, _STEP = map(int, (RequestKind.MALLOC, RequestKind.FAILED, RequestKind.STEP))
_FREES = frozenset(map(int, (RequestKind.FREE, RequestKind.FREE_LATER)))  # cudaFree waits for every stream


class UncachedAllocator:
    """A device whose memory is handed out without a cache.

    Args:
        total: bytes of the device.
        taken: bytes of it that the context and other processes hold.
    """

    def __init__(self, total: int, taken: int) -> None:
        self.free_bytes = total - taken
        """Bytes that the device has left."""
        self.calls = DriverCalls()
        self.allocated = self.peak_allocated = 0
        """Bytes as requested."""
        self.reserved = self.peak_reserved = 0
        """Bytes taken from the device."""

    def malloc(self, size: int) -> bool:
        """Allocate ``size`` bytes; return False if the device has too little memory left."""
        self.calls.malloc += 1
        if bytes_taken(size) > self.free_bytes:
            return False
        self._add(size, bytes_taken(size))
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def free(self, size: int) -> None:
        """Free memory that was allocated as ``size`` bytes."""
        self.calls.free += 1
        self._add(-size, -bytes_taken(size))

    def _add(self, size: int, taken: int) -> None:
        self.allocated += size
        self.reserved += taken
        self.free_bytes -= taken


def replay_uncached(asked: Requests, *, total: int, taken: int) -> Replay:
    """Replay requests without a cache; arguments as those of ``replay``."""
    device = UncachedAllocator(total, taken)
    sizes: dict[int, int] = {}
    steps: list[DriverCalls] = []
    failure = None
    for ask, number, size, event in zip(asked.ask, asked.block, asked.size, asked.event, strict=True):
        if ask == _MALLOC:
            if not device.malloc(size):
                failure = FailedMalloc(event, size, device.free_bytes)
                break
            sizes[number] = size
        elif ask in _FREES:
            device.free(sizes.pop(number))
        elif ask == _FAILED:  # the script went on without the block, even if the malloc succeeds here
            if device.malloc(size):
                device.free(size)
        elif ask == _STEP:
            steps.append(copy(device.calls))
    return Replay(
        failure=failure,
        peak_allocated=device.peak_allocated,
        peak_reserved=device.peak_reserved,
        most_taken=taken + device.peak_reserved if device.peak_reserved else 0,
        calls=device.calls,
        calls_per_step=steps[-1] - steps[-2] if len(steps) > 1 else None,
        statistics={  # PyTorch itself counts nothing in this mode
            "allocated_bytes.all.peak": device.peak_allocated,
            "reserved_bytes.all.peak": device.peak_reserved,
        },
        segments=(),
    )
