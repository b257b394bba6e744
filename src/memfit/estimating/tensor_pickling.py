"""Pickle tensors without their contents: describe them in one process, recreate them in another.

    parameter ──┐                                      ┌── parameter, untouched zeros
    its view  ──┼─> describe ─> StorageCopy (bytes) ─> ┼── view of the same memory
    tied one  ──┘   shape, dtype, strides, offset      └── the same object

Small storages keep their values: counters, masks and tables decide control flow and sizes. Large ones become
zeros, which take no memory until something writes to them.
"""

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

SMALL = 4096
"""Largest storage, in bytes, that keeps its values."""

Rebuild = tuple[Callable[..., torch.Tensor], tuple[Any, ...], Any, None, None, Callable[..., None]]
"""The result of ``__reduce__``: a function, its arguments, a state, and the function that sets the state."""


class StorageCopy:
    """A storage that tensors may share; pickled once however many do.

    Args:
        storage: the original.
        on_gpu: create the copy on the ghost; otherwise its module is moved there later.
    """

    def __init__(self, storage: torch.UntypedStorage, *, on_gpu: bool) -> None:
        self._storage = storage  # keeps the storage alive, so that its address is not reused
        self._on_gpu = on_gpu

    def __reduce__(self) -> tuple[Callable[..., torch.UntypedStorage], tuple[int, bool, bytes | None]]:
        size = self._storage.nbytes()
        meta = self._storage.device.type == "meta"
        kept = None if meta or size > SMALL else _contents(self._storage)
        return _make_storage, (size, self._on_gpu, kept)


def why_tensor_not_copyable(tensor: torch.Tensor) -> str:
    """Return why a tensor cannot be copied; empty if it can."""
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        return "it belongs to a lazy module that has no shapes yet; call the model once first"
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return "sparse, nested and quantized tensors are not supported"
    if tensor.is_conj() or tensor.is_neg():
        return "conjugate and negative views are not supported"
    dispatches = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    if dispatches and not hasattr(tensor, "__tensor_flatten__"):
        return "its class has no __tensor_flatten__ method, so its inner tensors are unknown"
    return ""


def describe_tensor_for_pickle(
    tensor: torch.Tensor, copies: dict[int, StorageCopy], *, on_gpu: bool
) -> Rebuild:
    """Return how pickle recreates a tensor without its contents.

    Args:
        tensor: one for which ``why_tensor_not_copyable`` returns nothing.
        copies: the storages described so far, by address; extended here.
        on_gpu: create the copy on the ghost.
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
    """Return the hooks on a leaf's gradient, and those that run after it is accumulated."""
    if not tensor.is_leaf:
        return [], []
    on_gradient: Mapping[int, Any] = tensor._backward_hooks or {}
    accumulated: Mapping[int, Any] = getattr(tensor, "_post_accumulate_grad_hooks", None) or {}
    return list(on_gradient.values()), list(accumulated.values())


# -- in the receiving process ------------------------------------------------------------


def _make_storage(size: int, on_gpu: bool, contents: bytes | None) -> torch.UntypedStorage:
    device = "cuda" if on_gpu else "cpu"
    if contents is None:
        memory = torch.empty(size, dtype=torch.uint8, device=device).zero_()
    else:
        memory = torch.frombuffer(bytearray(contents), dtype=torch.uint8) if contents else torch.empty(0)
        memory = memory.clone().to(device)  # cloned into memory that PyTorch owns
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
