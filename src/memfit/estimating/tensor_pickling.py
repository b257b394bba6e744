"""Tensors without their contents: how they are described in one process, and remade in another.

    parameter ──┐                                      ┌── parameter, untouched zeros
    its view  ──┼─> describe ─> StorageCopy (bytes) ─> ┼── view of the same memory
    tied one  ──┘   shape, dtype, strides, offset      └── the same object

What is small keeps its values: counters, masks and tables decide control flow and sizes. What is large is
zeros, which cost no memory until something writes to them.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

SMALL = 4096
"""Bytes up to which the memory behind a tensor keeps its values."""

Rebuild = tuple[Callable[..., torch.Tensor], tuple[Any, ...], Any, None, None, Callable[..., None]]
"""What pickle wants of an object: a function, its arguments, a state, and what sets the state."""


class StorageCopy:
    """Memory that tensors share; pickled once however many do.

    Args:
        storage: the original.
        on_gpu: whether the copy is on the ghost from the start, or moved there by its module.
    """

    def __init__(self, storage: torch.UntypedStorage, *, on_gpu: bool) -> None:
        self._storage = storage  # kept, so that its identity stays its own
        self._on_gpu = on_gpu

    def __reduce__(self) -> tuple[Callable[..., torch.UntypedStorage], tuple[int, bool, bytes | None]]:
        size = self._storage.nbytes()
        meta = self._storage.device.type == "meta"
        kept = None if meta or size > SMALL else _contents(self._storage)
        return _make_storage, (size, self._on_gpu, kept)


def why_not_copyable(tensor: torch.Tensor) -> str:
    """Say why a tensor cannot be described, or nothing if it can."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "a lazy module has no shapes yet; call the model once"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return "sparse, nested and quantized tensors are not copied"
    if tensor.is_conj() or tensor.is_neg():
        return "a view that negates or conjugates is not copied"
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if dispatches and not hasattr(tensor, "__tensor_flatten__"):
        return "a tensor subclass that does not say what it is made of (__tensor_flatten__)"
    return ""


def describe(tensor: torch.Tensor, copies: dict[int, StorageCopy], *, on_gpu: bool) -> Rebuild:
    """Return how a tensor is made again without its contents.

    Args:
        tensor: one that ``why_not_copyable`` has nothing against.
        copies: the storages described so far, by identity; added to.
        on_gpu: whether the copy is on the ghost from the start.
    """
    state = {"attributes": dict(vars(tensor)), "hooks": _hooks(tensor)}
    needs_grad = tensor.requires_grad and tensor.is_leaf
    kind = type(tensor)
    arguments: tuple[Any, ...]
    if hasattr(tensor, "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()
        parts = {name: getattr(tensor, name) for name in names}
        state["attributes"] = {key: value for key, value in vars(tensor).items() if key not in parts}
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        arguments = (kind, parts, context, shape, stride, needs_grad)
        return _make_wrapper, arguments, state, None, None, _set_state
    storage = tensor.untyped_storage()
    copy = copies.setdefault(storage._cdata, StorageCopy(storage, on_gpu=on_gpu))
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    arguments = (kind, copy, tensor.dtype, tensor.storage_offset(), shape, stride, needs_grad)
    return _make_tensor, arguments, state, None, None, _set_state


def _contents(storage: torch.UntypedStorage) -> bytes:
    on_cpu = storage.cpu()  # type: ignore[no-untyped-call]
    return ctypes.string_at(on_cpu.data_ptr(), on_cpu.nbytes()) if on_cpu.nbytes() else b""


def _hooks(tensor: torch.Tensor) -> tuple[list[Any], list[Any]]:
    """Return the hooks on a leaf's gradient, and those after it has been accumulated."""
    if not tensor.is_leaf:
        return [], []
    on_gradient: Mapping[int, Any] = tensor._backward_hooks or {}
    accumulated: Mapping[int, Any] = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(on_gradient.values()), list(accumulated.values())


# -- in the process that receives them ------------------------------------------------------------


def _make_storage(size: int, on_gpu: bool, contents: bytes | None) -> torch.UntypedStorage:
    device = "cuda" if on_gpu else "cpu"
    if contents is None:
        memory = torch.empty(size, dtype=torch.uint8, device=device).zero_()
    else:
        memory = torch.frombuffer(bytearray(contents), dtype=torch.uint8) if contents else torch.empty(0)
        memory = memory.clone().to(device)  # cloned: memory of PyTorch's own
    return memory.untyped_storage()


def _make_tensor(
    kind: type[torch.Tensor],
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    data = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
    if kind is torch.Tensor:
        return data.requires_grad_(requires_grad)
    return torch.Tensor._make_subclass(kind, data, requires_grad)


def _make_wrapper(
    kind: Any,
    parts: dict[str, torch.Tensor],
    context: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor: torch.Tensor = kind.__tensor_unflatten__(parts, context, shape, stride)
    return tensor.requires_grad_(requires_grad)


def _set_state(tensor: torch.Tensor, state: dict[str, Any]) -> None:
    tensor.__dict__.update(state["attributes"])
    on_gradient, accumulated = state["hooks"]
    for hook in on_gradient:
        tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    for hook in accumulated:
        tensor.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
