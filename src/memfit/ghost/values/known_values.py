"""Which tensors on the ghost are known to hold one value throughout.

Nothing is computed on the ghost (the CUDA runtime memfit puts in a GPU's place), but a script that fills a
flag with ``True`` and later asks for it must be told ``True``. This file keeps such knowledge; ``rules.py``
says where it comes from.

    done = torch.full((8,), False, device="cuda")    version 0 of its storage: False
    both = done | flags                              if both are known, so is the result
    done.add_(1)                                     no rule, but the version is now 1: forgotten

Knowledge hangs on a tensor's storage, for as long as the tensor lives that it was noted of (an address that
is used again belongs to another tensor), and on the version that autograd counts up with every write in
place, through whatever view. What writes without counting is met in two ways: knowledge is only noted where
no kernel can still be at work on the tensor (``rules.py``), and a storage that was handed out past the
counter, by ``Tensor.data``, ``data_ptr`` or DLPack, is not known again (``KnownValues.expose``).

Nothing here may change what is allocated. So no device memory is kept alive, and no storage is asked for as
a Python object: it would count one user more, and autograd would add up the gradients that live in it into
new memory instead of in place. Source: ``can_accumulate_inplace``, torch/csrc/autograd/input_buffer.cpp.
"""

import math
import struct
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

Number = bool | int | float

_data_ptr = torch.Tensor.data_ptr  # PyTorch's own: ``methods.py`` wraps what scripts call


class Basis(IntEnum):
    """What a known value rests on, from the surest; a result rests on the least sure of its inputs."""

    FILLED = 0  # the script put it there, or it follows from what the script put there
    FINITE = 1  # taken for granted: no value overflows or is NaN
    CHECKED = 2  # taken for granted: checks on values pass, and searches find nothing


class Known(NamedTuple):
    """The value that every element of a tensor holds, but for a few."""

    value: Number
    basis: Basis = Basis.FILLED
    exceptions: int = 0
    """How many elements at most may hold something else: those written by index since."""


def known_number(number: object) -> Known | None:
    """Return a plain number as known; None for anything else, complex numbers included."""
    return Known(number) if isinstance(number, bool | int | float) else None


class _Entry(NamedTuple):
    tensor: TensorWeakRef
    address: int  # of the storage's memory: a storage that is resized starts anew
    part: tuple[
        object, ...
    ]  # first and last element of the storage; with sizes and strides if there are gaps
    version: int
    dtype: torch.dtype
    known: Known


class KnownValues:
    """A map from tensors to the value they hold; absence means that nothing is known.

    >>> values = KnownValues()
    >>> flag = torch.zeros(3)
    >>> values.put(flag, Known(0.0))
    >>> values.get(flag[1:])
    Known(value=0.0, basis=<Basis.FILLED: 0>)
    >>> _ = flag.add_(1)
    >>> values.get(flag) is None
    True
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self._exposed: set[int] = set()
        self._sweep_at = 1024

    def get(self, tensor: torch.Tensor) -> Known | None:
        """Say what every element of ``tensor`` holds, if that is known.

        A view that reads the bytes as another dtype, negated or conjugated is not known.
        """
        known = self.mostly(tensor)
        return None if known is None or known.exceptions else known

    def mostly(self, tensor: torch.Tensor) -> Known | None:
        """Say what the elements of ``tensor`` hold but for ``Known.exceptions`` of them, if that is known.

        >>> values, mask = KnownValues(), torch.zeros(8)
        >>> values.put(mask, Known(0.0, exceptions=3))
        >>> values.mostly(mask[:4]).exceptions, values.get(mask) is None
        (3, True)
        """
        storage = _storage_id(tensor)
        entry = self._entries.get(storage)
        if (
            entry is None
            or entry.version != tensor._version
            or entry.dtype != tensor.dtype
            or entry.address != storage_start(tensor)
            or not _covers(entry.part, _part(tensor))
            or tensor.is_neg()
        ):
            return None
        noted = entry.tensor()
        return entry.known if noted is not None and _storage_id(noted) == storage else None

    def put(self, tensor: torch.Tensor, known: Known | None, *, fresh: bool = False) -> None:
        """Note that every element of ``tensor`` now holds ``known``, or with None that nothing is known.

        The value is rounded to the tensor's dtype; one that does not fit is not noted. Empty tensors and
        tensors that stand for others (subclasses, fake tensors) are passed over.

        Args:
            tensor: any tensor.
            known: what it holds.
            fresh: the tensor was made just now, so that nobody else can have hold of its storage.
        """
        storage = _storage_id(tensor)
        self._entries.pop(storage, None)
        if fresh:
            self._exposed.discard(storage)
        if known is None or not storage or storage in self._exposed:
            return
        if known.exceptions >= tensor.numel():
            return
        value = rounded(known.value, tensor.dtype)
        if value is not None:
            self._entries[storage] = _Entry(
                TensorWeakRef(tensor),
                storage_start(tensor),
                _part(tensor),
                tensor._version,
                tensor.dtype,
                known._replace(value=value),
            )
            self._sweep()

    def expose(self, tensor: torch.Tensor) -> None:
        """Forget ``tensor``'s storage for good: from now on it may be written without its version telling."""
        self.forget(tensor)
        self._exposed.add(_storage_id(tensor))

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def forget(self, tensor: torch.Tensor) -> None:
        """Drop what is known of ``tensor``, weak references to it included."""
        self._entries.pop(_storage_id(tensor), None)

    def _sweep(self) -> None:
        """Now and then, drop what belonged to tensors that are gone."""
        if len(self._entries) >= self._sweep_at:
            self._entries = {key: entry for key, entry in self._entries.items() if entry.tensor() is not None}
            self._sweep_at = 1024 + 2 * len(self._entries)


def rounded(value: Number, dtype: torch.dtype) -> Number | None:
    """Round a value as a tensor of ``dtype`` would hold it; None where it does not fit or is complex.

    >>> rounded(0.1, torch.float16), rounded(1e9, torch.float16), rounded(3.0, torch.bool)
    (0.0999755859375, inf, True)
    >>> rounded(300, torch.uint8) is None
    True
    """
    if dtype == torch.bool:
        return bool(value)
    if dtype.is_floating_point:
        return _rounded_float(float(value), dtype)
    if dtype.is_complex or not math.isfinite(value):
        return None
    limits = torch.iinfo(dtype)
    return int(value) if limits.min <= value <= limits.max else None


def _rounded_float(value: float, dtype: torch.dtype) -> float | None:
    if dtype == torch.float64 or not math.isfinite(value):
        return value
    try:
        if dtype == torch.float32:
            return float(struct.unpack("f", struct.pack("f", value))[0])
        if dtype == torch.float16:
            return float(struct.unpack("e", struct.pack("e", value))[0])
        if dtype == torch.bfloat16:  # the upper half of a float32, to the nearest, ties to even
            (bits,) = struct.unpack("I", struct.pack("f", value))
            bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
            return float(struct.unpack("f", struct.pack("I", bits))[0])
    except OverflowError:  # struct's word for a finite value beyond the largest
        return math.copysign(math.inf, value)
    return None  # the 8-bit and smaller formats


def is_plain(tensor: torch.Tensor) -> bool:
    """Say whether a tensor is an ordinary dense one: no subclass, nothing that stands for another tensor."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
    )


def _storage_id(tensor: torch.Tensor) -> int:
    """Identify the storage of an ordinary tensor that has a version; 0 stands for every other kind."""
    if not is_plain(tensor) or tensor.is_inference():
        return 0
    try:
        return int(torch._C._storage_address(tensor))  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError):  # the wrappers of torch.func have none
        return 0


def storage_start(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor's storage begins.

    Without ``untyped_storage()``: a gradient whose storage was once a Python object is no longer its
    buffer's only owner to autograd, which then adds to it out of place, in memory of its own.
    """
    return _data_ptr(tensor) - int(tensor.storage_offset()) * tensor.element_size()


def _part(tensor: torch.Tensor) -> tuple[object, ...]:
    """Say which elements of its storage a tensor is: first, last, and the way between if it skips some."""
    first = tensor.storage_offset()
    last = first + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (first, last) if tensor.is_contiguous() else (first, last, tensor.shape, tensor.stride())


def _covers(whole: tuple[Any, ...], part: tuple[Any, ...]) -> bool:
    """Say whether what fills ``whole`` fills ``part``: the same, or inside of one without gaps."""
    inside = bool(whole[0] <= part[0] and part[1] <= whole[1])
    return whole == part or (len(whole) == 2 and inside)  # noqa: PLR2004 - first and last
