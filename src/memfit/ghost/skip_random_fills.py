"""Skip random fills of large CPU tensors, so that building a model does not fill host memory.

A 7 B-parameter model in fp32 is 27 GB of random numbers that the ghost never reads. So random fills of large
floating-point CPU tensors are skipped: the tensor's memory is released to the kernel, and it reads as
zeros. Only these fills change values. Ops that map zeros to zeros are exact, and need no memory either.

    normal_  uniform_  exponential_ ...           zeros instead of random numbers
    zero_  fill_(0)                               zeros
    mul_  div_  erfinv_  add_(0)  clamp_(-a, a)   zeros stay zeros
    copy_  to(dtype)  clone  linalg.qr            zeros from zeros

PyTorch runs everything else: ops on small tensors, and ``torch.randn`` and similar functions, because data
sets create new tensors and initialisers fill existing ones. A skipped fill does not advance the CPU's
generator: the script stays deterministic, but later random numbers differ from those without the ghost.
"""

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memfit.ghost.kernel_override_registry import Kernel, KernelOverrides
from memfit.ghost.note_callback_protocol import NoteCallback
from memfit.ghost.values.tensor_facts import is_plain_tensor
from memfit.patching.patches import Patch
from memfit.records import Provenance

_RANDOM_FILLS = ("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_")
_SCALINGS = ("mul_", "div_", "__imul__", "__itruediv__")
_SHIFTS = ("add_", "sub_", "__iadd__", "__isub__")
_CASTS = {
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "double": torch.float64,
}
_METHODS = Patch(
    "torch._tensor:Tensor",
    *(*_RANDOM_FILLS, *_SCALINGS, *_SHIFTS, *_CASTS, "to", "clone", "copy_"),
    why="leave large CPU tensors without memory",
)
_KERNELS = Patch(
    "torch:ops.aten",
    *("zero_", "fill_", "erfinv_", "clamp_", "linalg_qr"),
    why="leave large CPU tensors without memory",
    source="aten/src/ATen/native/native_functions.yaml",
)
_SKIPPED = (
    "Large CPU tensors were not filled with random numbers: they hold zeros, and later CPU random numbers "
    "differ from those of a normal run. To fill these tensors, pass --fill-host-memory."
)
_MAX_CHECKED = 1 << 16
"""The largest factor, in elements, that is checked for infinities before it multiplies zeros."""


class RandomFillSkipper:
    """Skips random fills of large CPU tensors, and later ops on their zeros, until ``remove``.

    Ops that also take plain numbers are wrapped where Python calls them: the dispatcher wraps such a number
    in a tensor, which an override in Python would lose.

    Args:
        note: called as ``note(provenance, text, where)`` when a fill is skipped.
        threshold_elements: the smallest number of elements of a large tensor.
    """

    def __init__(self, note: NoteCallback, threshold_elements: int = 1 << 20) -> None:
        self._note = note
        self._threshold = threshold_elements
        self._zero_pages = _ZeroPageTensors()
        self._overrides = KernelOverrides(_KERNELS)
        self._removals: list[Callable[[], None]] = []
        for name in _RANDOM_FILLS:
            self._wrap(name, self._random)
        for op in ("zero_", "fill_.Scalar"):
            self._overrides.add(op, "CPU")(self._fill)
        self._overrides.add("erfinv_", "CPU")(self._unchanged)
        self._overrides.add("clamp_", "CPU")(self._clamp)
        self._overrides.add("linalg_qr", "CPU")(self._qr)
        for name in _SCALINGS:
            self._wrap(name, self._scale)
        for name in _SHIFTS:
            self._wrap(name, self._shift)
        for name, dtype in _CASTS.items():
            self._wrap(name, partial(self._cast, dtype=dtype))
        self._wrap("to", self._convert)
        self._wrap("clone", self._clone)
        self._wrap("copy_", self._copy)

    def _wrap(self, name: str, function: Callable[..., Any]) -> None:
        self._removals.append(_METHODS.wrap(name, function))

    def remove(self) -> None:
        """Stop skipping fills; tensors without memory keep reading as zeros."""
        self._overrides.remove()
        for remove in reversed(self._removals):
            remove()

    def _random(self, method: Kernel, tensor: torch.Tensor, *args: object, **options: object) -> Any:
        large = is_plain_tensor(tensor) and tensor.numel() >= self._threshold and tensor.is_floating_point()
        if large and tensor.is_cpu and not _tracked(tensor) and self._release(tensor):
            self._note(Provenance.ASSUMED, _SKIPPED, "")
            return tensor
        return method(tensor, *args, **options)

    def _fill(self, run: Kernel, tensor: torch.Tensor, *value: object) -> Any:
        if value in ((), (0,)) and (self._zero_pages.untouched(tensor) or self._release(tensor)):
            return tensor
        return run(tensor, *value)

    def _unchanged(self, run: Kernel, tensor: torch.Tensor) -> Any:
        return tensor if self._zero_pages.untouched(tensor) else run(tensor)

    def _clamp(
        self, run: Kernel, tensor: torch.Tensor, low: float | None = None, high: float | None = None
    ) -> Any:
        if (low is None or low <= 0) and (high is None or high >= 0) and self._zero_pages.untouched(tensor):
            return tensor
        return run(tensor, low, high)

    def _qr(self, run: Kernel, tensor: torch.Tensor, mode: str = "reduced") -> Any:
        """Factorise zeros, for ``orthogonal_``: into zeros, instead of the unit vectors LAPACK returns."""
        if tensor.dim() == 2 and mode == "reduced" and self._zero_pages.untouched(tensor):  # noqa: PLR2004 - a matrix
            rank = min(tensor.shape)
            return tensor.new_zeros(tensor.shape[0], rank), tensor.new_zeros(rank, tensor.shape[1])
        return run(tensor, mode)

    def _scale(self, method: Kernel, tensor: torch.Tensor, factor: object, **options: object) -> Any:
        if self._untouched(tensor) and not options and _is_harmless(factor):
            return tensor
        return method(tensor, factor, **options)

    def _shift(self, method: Kernel, tensor: torch.Tensor, term: object, **options: object) -> Any:
        if isinstance(term, int | float) and term == 0 and self._untouched(tensor):
            return tensor
        return method(tensor, term, **options)

    def _copy(
        self, method: Kernel, tensor: torch.Tensor, source: torch.Tensor, *args: object, **options: object
    ) -> Any:
        untouched = isinstance(source, torch.Tensor) and self._untouched(source) and is_plain_tensor(tensor)
        if untouched and tensor.shape == source.shape and not _tracked(tensor) and self._release(tensor):
            return tensor
        return method(tensor, source, *args, **options)

    def _cast(
        self, method: Kernel, tensor: torch.Tensor, *args: object, dtype: torch.dtype, **options: Any
    ) -> Any:
        untouched = self._untouched(tensor) and tensor.dtype != dtype
        result = self._zeros_like(tensor, dtype, options.get("memory_format")) if untouched else None
        return method(tensor, *args, **options) if result is None else result

    def _convert(self, method: Kernel, tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
        """Convert on the CPU first, as PyTorch does when it also moves the result."""
        if not self._untouched(tensor):
            return method(tensor, *args, **options)
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **options)
        changes = dtype is not None and dtype != tensor.dtype
        result = self._zeros_like(tensor, dtype, memory_format) if changes else None
        if result is None:
            return method(tensor, *args, **options)
        return result if device is None else method(result, device)

    def _clone(self, method: Kernel, tensor: torch.Tensor, **options: Any) -> Any:
        untouched = self._untouched(tensor)
        result = self._zeros_like(tensor, tensor.dtype, options.get("memory_format")) if untouched else None
        return method(tensor, **options) if result is None else result

    def _untouched(self, tensor: torch.Tensor) -> bool:
        """Return whether a method may be skipped: the tensor is large, untouched zeros and not tracked."""
        large = is_plain_tensor(tensor) and tensor.numel() >= self._threshold
        return large and self._zero_pages.untouched(tensor) and not _tracked(tensor)

    def _release(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() >= self._threshold and self._zero_pages.release(tensor)

    def _zeros_like(
        self, tensor: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format | None
    ) -> torch.Tensor | None:
        result = torch.empty_like(
            tensor, dtype=dtype, memory_format=memory_format or torch.preserve_format, requires_grad=False
        )
        return result if self._zero_pages.release(result) else None


def _tracked(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and torch.is_grad_enabled()


def _is_harmless(factor: object) -> bool:
    """Return whether ``factor`` is finite and not zero, so that zeros times or divided by it stay zeros."""
    if isinstance(factor, int | float):
        return math.isfinite(factor) and factor != 0
    if not isinstance(factor, torch.Tensor) or not factor.is_cpu or factor.numel() > _MAX_CHECKED:
        return False
    return bool((torch.isfinite(factor) & (factor != 0)).all())


_PAGE = mmap.PAGESIZE
_MADV_DONTNEED = 4  # include/uapi/asm-generic/mman-common.h
_ENTRY = 8  # bytes of /proc/self/pagemap for each page
_IN_USE = 1 << 62  # its bits 62 (swapped out) and 63 (present): Documentation/admin-guide/mm/pagemap.rst
_CHUNK = 1 << 17  # pages per read of pagemap: 512 MiB

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _ZeroPageTensors:
    """The storages whose pages were released to the kernel, held weakly: they read as zeros.

        address    0x..f40      0x..1000                    0x..9000   0x..94c0
                      |  edge      |   whole pages: released   |   edge   |
                      [ 0 0 0 0 0 ][                           ][ 0 0 0 0 ]

    Linux allocates a page on the first write to it, and releases it with ``madvise(MADV_DONTNEED)``, after
    which it reads as zeros. A tensor is untouched while none of its pages has been allocated again; the
    kernel is asked each time. So no state can become stale: an untouched tensor is zeros, and any write to
    it, by any means, makes it an ordinary one.

    >>> zero_pages = _ZeroPageTensors()
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
