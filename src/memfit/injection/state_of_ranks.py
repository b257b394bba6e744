"""Read, change, save and load the state of a sharded training as a script for one process does.

    norm.item(), f"{norm}"         fsdp2: every rank reads the whole tensor
    weight[0].mul_(0.5)            fsdp2: every rank changes the whole tensor, and keeps its shard
    average.lerp_(weight, 0.1)     fsdp2: of a plain tensor and a shard, the whole
    torch.save(state)              shards are gathered one by one, on all ranks; rank 0 writes one file
    optimizer.state_dict()         zero1: rank 0 gets the state of all ranks, the others their own
    load_state_dict(state)         fsdp2: each rank takes its shards of whole tensors

The file has plain tensors on the CPU, and loads without ranks.
"""

import copy
import io
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from memfit.errors import UsageError
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_SAVE = Patch("torch.serialization", "save", also="torch", why="gather shards, and write one file")
_ZERO = Patch(
    "torch.distributed.optim.zero_redundancy_optimizer:ZeroRedundancyOptimizer",
    "state_dict",
    why="return the state of all ranks",
)
_LOAD = Patch("torch.optim.optimizer:Optimizer", "load_state_dict", why="take a rank's shards of a state")
_READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__format__")
_WRITES = (
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__"),
    *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"),
)
_ROWS = ("unbind", "__iter__")
_UNSHARDABLE = ("redistribut", "sharding strategy", "Sharding propagation")  # in what DTensor raises
_PROPERTIES = ("__get__", "__set__", "__delete__")
_PENALTIES = (
    *("pow", "__pow__", "square", "abs", "sum"),
    *("mul", "__mul__", "__rmul__", "sub", "__sub__", "__rsub__"),
)
"""Of parameters, with a new result. Where ranks have no rows, DTensor gives their gradients another shape."""
_DTENSOR = Patch(
    "torch.distributed.tensor:DTensor",
    "__torch_function__",
    why="read and change whole tensors, not a rank's shards",
)


def install_state_of_ranks(hooks: InstalledHooks) -> None:
    """Have what the script reads, changes, saves and loads suit its shards."""
    hooks.replace(_DTENSOR, "__torch_function__", lambda _: classmethod(_on_shards))
    hooks.wrap(_SAVE, "save", _save)
    hooks.wrap(_ZERO, "state_dict", _whole_state_dict)
    hooks.wrap(_LOAD, "load_state_dict", _load_optimizer)


def _on_shards(
    _: type, function: Callable[..., Any], __: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Run a PyTorch function on shards. It may gather them, because every rank runs the script."""
    name, kwargs = getattr(function, "__name__", ""), kwargs or {}
    with torch._C.DisableTorchFunctionSubclass():
        if name in _ROWS and isinstance(args[0], DTensor):
            return _rows(name, *args, **kwargs)
        if name == "__set__" and isinstance(args[0], DTensor) and isinstance(args[1], torch.Tensor):
            return _assign(function, *args)
        is_write = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
        is_write &= bool(args)  # functions of nn.init have keywords, and write themselves
        if is_write and isinstance(args[0], DTensor):
            return _write(function, name, args, kwargs)
        written = [*(args[0] if is_write and isinstance(args[0], list | tuple) else ()), kwargs.get("out")]
        if any(isinstance(each, DTensor) and _copied(each) is not None for each in written):
            raise UsageError(
                f"sharding: {name} would change a part of a sharded tensor, and loses it. {_ADVICE}"
            )
        mixed = _is_mixed((args, *kwargs.values())) or (is_write and isinstance(args[0], torch.Tensor))
        mixed |= name in _PENALTIES and any(map(_leaves_ranks_empty, args))
        if name in _READS or (mixed and name not in _PROPERTIES):
            args, kwargs = _gathered(args), {key: _gathered(each) for key, each in kwargs.items()}
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if not any(each in str(error) for each in _UNSHARDABLE):
                raise
            raise UsageError(
                f"sharding: the script calls {name} on a sharded parameter, which PyTorch's DTensor does not "
                "do. Call it on parameter.full_tensor() to read it, or use zero1 or ddp."
            ) from error


_ADVICE = "Change it with tensor[...] = value or a method of the part, such as mul_; or use zero1 or ddp."


def _write(function: Callable[..., Any], name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Change a sharded tensor or a part of it: where PyTorch would change a copy, the whole."""
    target, *others = args
    base: Any = _copied(target)
    is_item, is_refused = name == "__setitem__", torch.is_grad_enabled() and target.requires_grad
    if is_refused or (base is None and not is_item and not _is_mixed(others)):
        return function(*args, **kwargs)  # by PyTorch, of what autograd needs
    whole = (target if base is None else base).detach().full_tensor()
    part, seen = whole, None
    if base is not None:
        seen = target.detach().to_local()
        if seen.untyped_storage().nbytes() != whole.untyped_storage().nbytes():
            raise UsageError(f"sharding: the script changes a part of a sharded tensor by {name}. {_ADVICE}")
        part = whole.as_strided(seen.size(), seen.stride(), seen.storage_offset())
    result = function(part, *_gathered(others), **{key: _gathered(each) for key, each in kwargs.items()})
    own = target if base is None else base
    own.detach().to_local().copy_(_shard_like(own, whole).to_local())
    if seen is not None:
        seen.copy_(part)
    return target if result is part else result


def _assign(function: Callable[..., Any], own: Any, value: torch.Tensor) -> None:
    """Assign a whole tensor, or a sharded one, to ``own.data`` or ``own.grad``."""
    shard: Any = _shard_like(own, value)
    if function != torch.Tensor.data.__set__:  # type: ignore[attr-defined]
        function(own, shard)
        return
    if not isinstance(shard, DTensor) or shard.placements != own.placements:
        raise UsageError(f"sharding: the script assigns data of another shape to a sharded tensor. {_ADVICE}")
    own.detach().to_local().copy_(shard.to_local())


def _rows(name: str, tensor: DTensor, dim: int = 0) -> Any:
    """Return parts of one index each, which DTensor itself divides along no sharded dimension."""
    parts = tuple(tensor.select(dim, index) for index in range(tensor.size(dim)))
    return parts if name == "unbind" else iter(parts)


def _copied(part: DTensor) -> DTensor | None:
    """Return the sharded tensor of a replicated view, such as a row; None if the part is no such view."""
    base = part._base
    if not isinstance(base, DTensor):
        return None
    both = zip(part.placements, base.placements, strict=True)
    return base if any(one.is_replicate() and not other.is_replicate() for one, other in both) else None


def _is_mixed(value: Any) -> bool:
    """Return whether there is a plain tensor, of more than a number or with a gradient, among arguments."""
    if isinstance(value, list | tuple):
        return any(map(_is_mixed, value))
    is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    return is_plain and (value.numel() != 1 or value.requires_grad)


def _leaves_ranks_empty(value: Any) -> bool:
    return isinstance(value, DTensor) and value.dim() > 0 and value.size(0) < value.device_mesh.size()


def _gathered(value: Any) -> Any:
    """Return arguments with whole tensors in place of shards."""
    if type(value) in (list, tuple):
        return type(value)(map(_gathered, value))
    return value.full_tensor() if isinstance(value, DTensor) else value


def take_shards_when_loading(model: nn.Module) -> None:
    """Have a sharded model take its shards of the whole tensors that the script loads into it."""
    for module in model.modules():
        if any(isinstance(each, DTensor) for each in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_take_shards)  # type: ignore[no-untyped-call]


def _take_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, own in module.named_parameters(recurse=False):
        if prefix + name in state:
            state[prefix + name] = _shard_like(own, state[prefix + name])


def _load_optimizer(
    original: Callable[..., None], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> None:
    own = [each for group in optimizer.param_groups for each in group["params"]]
    saved = [number for group in state["param_groups"] for number in group["params"]]
    if len(own) == len(saved) and any(isinstance(each, DTensor) for each in own):
        of = dict(zip(saved, own, strict=True))
        entries = {
            number: {name: _shard_like(of[number], value) for name, value in each.items()}
            if number in of
            else each
            for number, each in state["state"].items()
        }
        state = {**state, "state": entries}
    original(optimizer, state)


def _shard_like(own: Any, value: Any) -> Any:
    """Return this rank's shard of a whole tensor, divided as its own is; any other value is itself."""
    whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if not whole or not isinstance(own, DTensor) or value.shape != own.shape:
        return value
    moved = value.detach().to(own.device)
    return distribute_tensor(moved, own.device_mesh, own.placements, src_data_rank=None)


def _save(original: Callable[..., None], value: Any, file: Any, *args: Any, **kwargs: Any) -> None:
    """Save on rank 0; every rank takes part in gathering, and goes on when the file is there."""
    is_first, in_memory = os.environ.get("RANK", "0") == "0", isinstance(file, io.BytesIO)
    value = _whole(value, keeps=is_first or in_memory)
    if is_first or in_memory:
        original(value, file, *args, **kwargs)
    if dist.is_initialized() and not in_memory:  # PyTorch itself saves objects to send them
        dist.barrier()


def _whole(value: Any, *, keeps: bool) -> Any:
    """Return a value with whole tensors on the CPU in place of shards, if this rank ``keeps`` it."""
    if isinstance(value, DTensor):
        whole = value.full_tensor().detach()
        return whole.cpu() if keeps else None
    if isinstance(value, nn.Module) and any(isinstance(each, DTensor) for each in value.parameters()):
        raise UsageError(
            f"sharding: torch.save of a whole {type(value).__name__} would save this rank's shards. Save "
            "model.state_dict()."
        )
    if isinstance(value, dict):
        entries = {name: _whole(each, keeps=keeps) for name, each in value.items()}
        if all(entries[name] is each for name, each in value.items()):
            return value
        copied = copy.copy(value)  # with what else it has, such as the versions of a state_dict
        copied.update(entries)
        return copied
    if type(value) in (list, tuple):
        items = [_whole(each, keeps=keeps) for each in value]
        return value if all(map(_is, items, value)) else type(value)(items)
    return value


def _is(one: Any, other: Any) -> bool:
    return one is other


def _whole_state_dict(original: Callable[..., Any], optimizer: Any) -> Any:
    """Return the state of all ranks on rank 0, which saves it; on the others their own, to load again."""
    optimizer.consolidate_state_dict(to=0)
    if optimizer.rank == 0:
        return original(optimizer)
    found = torch.optim.Optimizer.state_dict(optimizer)
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    own = {
        index: optimizer.optim.state[each]
        for index, each in enumerate(parameters)
        if each in optimizer.optim.state
    }
    found["state"] = tree_map_only(torch.Tensor, lambda each: each.to("cpu", copy=True), own)  # as on rank 0
    return found
