"""CPU tensors whose memory was never touched: they read as zeros and cost nothing.

    address    0x..f40      0x..1000                    0x..9000   0x..94c0
                  |  edge      |   whole pages: released   |   edge   |
                  [ 0 0 0 0 0 ][                           ][ 0 0 0 0 ]

Linux gives a page of memory only when something writes to it, and takes it back, zeros and all, with
``madvise(MADV_DONTNEED)``. A tensor is hollow while none of its pages has come back since, which the kernel
is asked each time. So there is nothing to keep in step: a hollow tensor is zeros, and whatever writes into
it, in whatever way, makes it an ordinary one.
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
_CHUNK = 1 << 17  # pages asked about at once: 512 MiB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HollowTensors:
    """The storages that were emptied, held weakly.

    >>> hollow = HollowTensors()
    >>> weights = torch.full((1024, 1024), 3.0)
    >>> hollow.empty(weights), hollow.holds(weights), weights.sum().item()
    (True, True, 0.0)
    >>> _ = weights[5].fill_(1.0)
    >>> hollow.holds(weights), weights.sum().item()
    (False, 1024.0)
    """

    def __init__(self) -> None:
        self._marked: dict[int, StorageWeakRef] = {}
        self._sweep_at = 1024

    def empty(self, tensor: torch.Tensor) -> bool:
        """Make a tensor zeros by giving its memory back, if PyTorch's CPU allocator made it for this alone.

        Returns:
            Whether it was done; views of something larger, shared and pinned memory, files, and what another
            library lent are left alone.
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

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether the memory of ``tensor``, or of what it is a view of, is hollow still."""
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
    """Ask the kernel whether no whole page inside has come back, and look at the edges."""
    low, high = _pages(start, size)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:  # noqa: PTH123 - unbuffered, by offset
            for first in range(low // _PAGE, high // _PAGE, _CHUNK):
                count = min(_CHUNK, high // _PAGE - first)
                entries = os.pread(pagemap.fileno(), count * _ENTRY, first * _ENTRY)
                if len(entries) < count * _ENTRY or np.frombuffer(entries, np.uint64).max() >= _IN_USE:
                    return False
    except OSError:  # a sandbox without it: then nothing is taken to be hollow
        return False
    return not any(any(ctypes.string_at(edge, length)) for edge, length in _edges(start, size))


def _pages(start: int, size: int) -> tuple[int, int]:
    """Return where the pages that lie wholly inside begin and end."""
    return -(-start // _PAGE) * _PAGE, (start + size) // _PAGE * _PAGE


def _edges(start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield address and length of what is left before and after the whole pages."""
    low, high = _pages(start, size)
    yield start, low - start
    yield high, start + size - high
