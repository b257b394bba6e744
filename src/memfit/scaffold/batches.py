"""Code that makes a batch like one that a script used, of any number of samples."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_FEW = 2
"""Values below which integers are drawn if nothing says how large they may be."""


def has_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or a container that has one."""
    return next(iter(tensors_in(value)), None) is not None


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a batch: of lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def code_of_batch(value: Any, size: int, limits: Mapping[int, int]) -> str:
    """Return the expression that makes a batch, of random values.

    Args:
        value: a batch of the script's: tensors, and lists, tuples and dictionaries of them.
        size: samples in it: dimensions in front that are as long become ``size``.
        limits: by the address of a storage, the number below which its numbers must stay.

    >>> code_of_batch({"x": torch.ones(4, 3), "y": torch.ones(4, dtype=torch.long)}, 4, {})
    "{'x': torch.randn(size, 3), 'y': torch.randint(2, (size,))}"
    """
    if isinstance(value, torch.Tensor):
        return _code_of_tensor(value, size, limits)
    if isinstance(value, Mapping):
        items = (f"{name!r}: {code_of_batch(each, size, limits)}" for name, each in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        inside = ", ".join(code_of_batch(each, size, limits) for each in value)
        if isinstance(value, list):
            return f"[{inside}]"
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    return repr(value)


def is_plain(value: Any) -> bool:
    """Return whether ``code_of_batch`` can write a value as it is."""
    if isinstance(value, Mapping):
        return all(isinstance(name, str) for name in value) and all(map(is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(is_plain, value))
    return isinstance(value, torch.Tensor | str | int | float | bool | None)


def _code_of_tensor(tensor: torch.Tensor, size: int, limits: Mapping[int, int]) -> str:
    shape = [str(each) for each in tensor.shape]
    if shape and tensor.shape[0] == size:
        shape[0] = "size"
    listed, limit = ", ".join(shape), limits.get(tensor.untyped_storage()._cdata)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        dtype = "" if tensor.dtype is torch.float32 else f", dtype={tensor.dtype}"
        return f"torch.{'randn' if limit is None else 'rand'}({listed or '()'}{dtype})"
    sizes = f"({listed}{',' * (len(shape) == 1)})"
    if tensor.dtype is torch.bool:
        return f"torch.ones({sizes}, dtype=torch.bool)"
    dtype = "" if tensor.dtype is torch.int64 else f", dtype={tensor.dtype}"
    return f"torch.randint({limit or _FEW}, {sizes}{dtype})"
