"""CPU tensors whose memory pages were released to the kernel: they read as zeros and use no memory.

    address    0x..f40      0x..1000                    0x..9000   0x..94c0
                  |  edge      |   whole pages: released   |   edge   |
                  [ 0 0 0 0 0 ][                           ][ 0 0 0 0 ]

Linux allocates a page on the first write to it, and releases it with ``madvise(MADV_DONTNEED)``, after which
it reads as zeros. A tensor is untouched while none of its pages has been allocated again; the kernel is
asked each time. So no state can become stale: an untouched tensor is zeros, and any write to it, by any
means, makes it an ordinary one.
"""

import ctypes
import mmap
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_PAGE = mmap.PAGESIZE
_MADV_DONTNEED = 4  # include/uapi/asm-generic/mman-common.h
_ENTRY = 8  # bytes of /proc/self/pagemap for each page
_IN_USE = 1 << 62  # its bits 62 (swapped out) and 63 (present): Documentation/admin-guide/mm/pagemap.rst
_CHUNK = 1 << 17  # pages per read of pagemap: 512 MiB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class ZeroPageTensors:
    """The storages whose pages were released, held weakly.

    >>> zero_pages = ZeroPageTensors()
    >>> weights = torch.full((1024, 1024), 3.0)
    >>> zero_pages.release(weights), zero_pages.untouched(weights), weights.sum().item()
    (True, True, 0.0)
    >>> _ = weights[5].fill_(1.0)
    >>> zero_pages.untouched(weights), weights.sum().item()
    (False, 1024.0)
    """

    def __init__(self) -> None:
        self._marked: dict[int, StorageWeakRef] = {}
        self._sweep_at = 1024

    def release(self, tensor: torch.Tensor) -> bool:
        """Release a tensor's pages, so that it reads as zeros, if it owns its whole storage.

        Returns:
            Whether the pages were released. Views of larger tensors, shared and pinned memory, mapped files
            and memory of other libraries are left unchanged.
        """
        if not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        start, size = storage.data_ptr(), storage.nbytes()
        whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == size
        if not whole or not storage.resizable() or storage.is_shared() or tensor.is_pinned():
            return False
        low, high = _pages(start, size)
        if low >= high or _libc.madvise(low, high - low, _MADV_DONTNEED) != 0:
            return False
        for edge, length in _edges(start, size):
            ctypes.memset(edge, 0, length)
        self._mark(storage)
        return True

    def _mark(self, storage: torch.UntypedStorage) -> None:
        self._marked[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        if len(self._marked) >= self._sweep_at:
            self._marked = {key: weak for key, weak in self._marked.items() if not weak.expired()}  # type: ignore[no-untyped-call]
            self._sweep_at = 1024 + 2 * len(self._marked)

    def untouched(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of ``tensor`` was released and not written to since."""
        if not self._marked or not tensor.is_cpu or tensor.layout is not torch.strided:
            return False
        storage = tensor.untyped_storage()
        if storage._cdata not in self._marked:
            return False
        if _untouched(storage.data_ptr(), storage.nbytes()):
            return True
        del self._marked[storage._cdata]
        return False


def _untouched(start: int, size: int) -> bool:
    """Return whether the kernel has allocated no whole page of the range, and its edges are zeros."""
    low, high = _pages(start, size)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123 - unbuffered, by offset
            for first in range(low // _PAGE, high // _PAGE, _CHUNK):
                count = min(_CHUNK, high // _PAGE - first)
                entries = os.pread(pagemap.fileno(), count * _ENTRY, first * _ENTRY)
                if len(entries) < count * _ENTRY or np.frombuffer(entries, np.uint64).max() >= _IN_USE:
                    return False
    except OSError:  # a sandbox without pagemap: every tensor counts as written to
        return False
    return not any(any(ctypes.string_at(edge, length)) for edge, length in _edges(start, size))


def _pages(start: int, size: int) -> tuple[int, int]:
    """Return the start and end of the whole pages inside a range."""
    return -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE


def _edges(start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the address and length of the bytes before and after the whole pages."""
    low, high = _pages(start, size)
    yield start, low - start
    yield high, start + size - high
