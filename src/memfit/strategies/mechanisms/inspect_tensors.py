"""Tensors inside objects, their versions, and copies that share no memory."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def tensors_in_object(value: object, depth: int = 4) -> list[torch.Tensor]:
    """Return the tensors that an object holds, up to ``depth`` levels deep; modules are not searched."""
    if isinstance(value, torch.Tensor):
        return [value]
    if depth == 0 or isinstance(value, nn.Module | type):
        return []
    if isinstance(value, list | tuple):  # first: asking for a Mapping takes longer
        held: Iterable[object] = value
    elif isinstance(value, Mapping):
        held = value.values()
    else:
        held = getattr(value, "__dict__", {}).values()
    return [tensor for each in held for tensor in tensors_in_object(each, depth - 1)]


def tensor_version(value: object) -> int:
    """Return autograd's count of writes to a tensor; 0 for anything that has no count."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def inner_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors that a tensor subclass is made of; the tensor itself if it is plain.

    A quantised state consists of several, and copying the whole may copy none of them: torchao's ``to``
    shares them on the same device.
    """
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), torch.Tensor):  # a DTensor's mesh is a part, too
            yield from inner_tensors(part)


def leaves_beside(loss: torch.Tensor, known: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a loss depends on and would give a gradient, beside the known ones.

    Tensors without elements, which make PyTorch's functions differentiable, do not count.
    """
    ids, ends = set(), set()
    for each in known:
        ids.add(id(each))
        ends.add(each.grad_fn)
    waiting = [loss.grad_fn]
    seen = ends | {loss.grad_fn}
    while waiting:
        node: Any = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and leaf.numel() and id(leaf) not in ids:
            yield leaf
        ahead = {each for each, _ in getattr(node, "next_functions", ())} - seen - {None}
        seen |= ahead
        waiting += ahead


def independent_tensor_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that shares no memory with a tensor, also of a subclass made of several tensors."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return tensor.detach().clone()
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    inner = {
        name: independent_tensor_copy(part) if isinstance(part, torch.Tensor) else part
        for name, part in parts.items()
    }
    copied: torch.Tensor = type(tensor).__tensor_unflatten__(  # type: ignore[attr-defined]
        inner, context, tensor.size(), tensor.stride()
    )
    return copied
