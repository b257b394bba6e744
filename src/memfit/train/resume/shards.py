"""The shards of DTensors: this rank's part as a plain tensor, and back, without communication."""

import sys
from typing import Any

import torch


def is_sharded(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: all of a plain one."""
    if not is_sharded(tensor):
        return tensor.detach()
    part: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def empty_like_on_host(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor on the host, divided over the ranks like another."""
    return torch.empty_like(like.detach(), device="cpu", dtype=dtype, requires_grad=False)


def from_part(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is divided like another, from this rank's part of it."""
    if not is_sharded(like):
        return part
    whole = empty_like_on_host(like, part.dtype)
    local_part(whole).copy_(part)
    return whole


def from_whole(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is divided like another, from all of it."""
    if not is_sharded(like) or is_sharded(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    # Every rank has all of it (src_data_rank=None): nothing is sent.
    divided = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)
    return from_part(local_part(divided), like)
