"""Split a run's state into parts that ranks share, that each rank has, and that ranks divide; and join them.

    tensors   parameters, and the optimizer's state of each parameter     torch.distributed.checkpoint
    shared    counters, scheduler, loss scale, precision, groups          one file
    own       random numbers, position in the data, buffers, callbacks,   a file per rank
              an open window and its gradients

Buffers differ between ranks: each rank's batch norms see its own batches. Tensors have the same names however
the model is divided, so that they can be read with another sharding, or by a single process.

Each rank saves its own random numbers, and a rank that is new is seeded. After a restart, a rank may use
another GPU of its machine: the state of the GPU that it uses is saved, and restored on the one that it uses
then.
"""

import hashlib
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from memfit.errors import UsageError
from memfit.random_state import arrays_to_tensors
from memfit.train.resume.saved_engine_parts import (
    EngineParts,
    indices_of_own_parameters,
    model_without_wrappers,
    named_model_and_optimizer_parameters,
)
from memfit.train.resume.saved_run_compatibility import check_saved_shapes
from memfit.train.resume.saved_run_format import SavedOptimizerParameterState

_OWN = ("others", "position", "random", "window", "callbacks")


@dataclass(frozen=True, slots=True)
class SplitRunState:
    """A run's state on one rank."""

    tensors: dict[str, torch.Tensor]
    shared: dict[str, Any]
    own: dict[str, Any]
    """This rank's part of the state; of ``model``, only buffers and extra state."""
    entries: dict[int, SavedOptimizerParameterState]
    """The optimizer's state of the parameters that this rank updates, by index."""


def split_run_state(parts: EngineParts, state: dict[str, Any]) -> SplitRunState:
    """Split a rank's state.

    Raises:
        UsageError: the optimizer divides a tensor in another way than its parameter.
    """
    tensors: dict[str, torch.Tensor] = {}
    model, parameters = {}, dict(model_without_wrappers(parts).named_parameters(remove_duplicate=False))
    for name, value in state["model"].items():
        if name in parameters and _is_plain(value):
            tensors[f"model.{name}"] = value.detach()
        else:
            model[name] = value
    names, of_name = _names(state), named_model_and_optimizer_parameters(parts)
    entries: dict[int, SavedOptimizerParameterState] = {}
    for index, entry in state["optimizer"]["state"].items():
        name = names[index]
        kept = {key: value for key, value in entry.items() if _is_plain(value)}
        for key, value in kept.items():
            _expect_divided_alike(f"{key} of {name}", value, of_name[name])
            tensors[_entry(name, key)] = value.detach()
        others = {key: value for key, value in entry.items() if key not in kept}
        entries[index] = {"tensors": list(kept), "values": others}
    gradients = {name: _local_part(each) for name, each in state["gradients"].items()}
    own = {name: state[name] for name in _OWN} | {"model": model, "gradients": gradients}
    shared = {name: value for name, value in state.items() if name not in own and name != "optimizer"}
    return SplitRunState(tensors, shared | {"optimizer": state["optimizer"]["param_groups"]}, own, entries)


def empty_tensors_of_rank(
    parts: EngineParts,
    shared: dict[str, Any],
    entries: dict[int, SavedOptimizerParameterState],
    stored: Mapping[str, Any],
) -> dict[str, torch.Tensor]:
    """Return empty tensors for this rank's share of the saved ones, divided as this engine divides them.

    Args:
        parts: the engine that will resume.
        shared: the part of the state that is the same on all ranks.
        entries: of the parameters that this rank's optimizer updates.
        stored: the ``TensorStorageMetadata`` of the saved tensors, by name.

    Raises:
        UsageError: the engine's model has other parameters.
        KeyError: a tensor is missing.
    """
    model = model_without_wrappers(parts)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    here = {name: each for name, each in model.state_dict().items() if name in parameters}
    there = {
        name.removeprefix("model."): torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        for name, each in stored.items()
        if name.startswith("model.")
    }
    check_saved_shapes(here, there)
    likes = {f"model.{name}": each for name, each in here.items()}
    of_name, names = named_model_and_optimizer_parameters(parts), _names(shared)
    for index in indices_of_own_parameters(parts.optimizer):
        for key in entries[index]["tensors"] if index in entries else ():
            likes[_entry(names[index], key)] = of_name[names[index]]
    return {name: _empty(like, stored[name]) for name, like in likes.items()}


def join_run_state(
    parts: EngineParts,
    shared: dict[str, Any],
    own: dict[str, Any],
    entries: dict[int, SavedOptimizerParameterState],
    tensors: Mapping[str, torch.Tensor],
) -> dict[str, Any]:
    """Return the whole state of a rank."""
    names, of_name = _names(shared), named_model_and_optimizer_parameters(parts)
    model = {name.removeprefix("model."): each for name, each in tensors.items() if name.startswith("model.")}
    state = {
        index: {key: tensors[_entry(names[index], key)] for key in entries[index]["tensors"]}
        | entries[index]["values"]
        for index in indices_of_own_parameters(parts.optimizer)
        if index in entries
    }
    gradients = {
        name: _sharded_like_from_part(each, of_name[name]) if name in of_name else each
        for name, each in own["gradients"].items()
    }
    return {
        **shared,
        **own,
        "model": model | own["model"],
        "optimizer": {"state": state, "param_groups": shared["optimizer"]},
        "gradients": gradients,
    }


def rank_part_of_single_process_run(parts: EngineParts, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a rank's part of a state that a single process saved, and that suits the engine."""
    likes, names, of_name = (
        model_without_wrappers(parts).state_dict(),
        _names(saved),
        named_model_and_optimizer_parameters(parts),
    )
    model = {name: _divided(value, likes[name]) for name, value in saved["model"].items()}
    state = {
        index: {key: _divided(value, of_name[names[index]]) for key, value in entry.items()}
        for index, entry in saved["optimizer"]["state"].items()
    }
    gradients = {name: _divided(each, of_name[name]) for name, each in saved["gradients"].items()}
    optimizer = saved["optimizer"] | {"state": state}
    return saved | {"model": model, "optimizer": optimizer, "gradients": gradients}


def _divided(value: Any, like: Any) -> Any:
    """Return this rank's part of a tensor, if it has the shape of one that is divided."""
    divides = is_dtensor(like) and isinstance(value, torch.Tensor) and value.shape == like.shape
    return _sharded_like_from_whole(value, like) if divides else value


def _names(state: dict[str, Any]) -> list[str]:
    return [name for group in state["groups"] for name in group]


def _entry(name: str, key: str) -> str:
    return f"optimizer.{name}.{key}"


def _is_plain(value: Any) -> bool:
    """Return whether the folder can hold a value: a dense tensor, or one divided into dense tensors."""
    if not isinstance(value, torch.Tensor):
        return False
    part = _local_part(value)
    return type(part) in (torch.Tensor, torch.nn.Parameter) and part.layout is torch.strided


def _expect_divided_alike(what: str, value: torch.Tensor, parameter: torch.Tensor) -> None:
    if is_dtensor(value) and not (
        is_dtensor(parameter) and value.shape == parameter.shape and value.placements == parameter.placements  # type: ignore[attr-defined]
    ):
        raise UsageError(
            f"Cannot save the run: the optimizer divides {what} in another way than its parameter. memfit "
            "saves the state of optimizers that divide it as fully_shard divides the parameters."
        )


def _empty(like: torch.Tensor, stored: Any) -> torch.Tensor:
    if is_dtensor(like) and like.shape == stored.size:
        return _empty_like_on_host(like, stored.properties.dtype)
    return torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")


# ---- Shards of DTensors: this rank's part as a plain tensor, and back, without communication -------------


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: all of a plain one."""
    if not is_dtensor(tensor):
        return tensor.detach()
    part: torch.Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return part


def _empty_like_on_host(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an empty tensor on the host, divided over the ranks like another."""
    return torch.empty_like(like.detach(), device="cpu", dtype=dtype, requires_grad=False)


def _sharded_like_from_part(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is divided like another, from this rank's part of it."""
    if not is_dtensor(like):
        return part
    whole = _empty_like_on_host(like, part.dtype)
    _local_part(whole).copy_(part)
    return whole


def _sharded_like_from_whole(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor that is divided like another, from all of it."""
    if not is_dtensor(like) or is_dtensor(whole):
        return whole
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    # Every rank has all of it (src_data_rank=None): nothing is sent.
    divided = distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None)
    return _sharded_like_from_part(_local_part(divided), like)


# ---- Random numbers of the ranks -------------------------------------------------------------------------


def with_changed_random_states(
    run: dict[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Return a saved run with each of its random states changed."""
    position = dict(run["position"])
    for name in ("began", "before"):
        if position[name] is not None:
            position[name] = change(position[name])
    return run | {"position": position, "random": change(run["random"])}


def random_state_with_own_gpu(state: dict[str, Any]) -> dict[str, Any]:
    """Return a random state with that of the GPU that this rank uses, and no other GPU's."""
    if "cuda" not in state:
        return state
    return state | {"cuda": [state["cuda"][torch.cuda.current_device()]]}


def random_state_with_all_gpus(state: dict[str, Any]) -> dict[str, Any]:
    """Undo ``random_state_with_own_gpu``; the other GPUs of this machine keep their current states."""
    if "cuda" not in state or not torch.cuda.is_available():
        return state
    states = torch.cuda.get_rng_state_all()
    states[torch.cuda.current_device()] = state["cuda"][0]
    return state | {"cuda": states}


def random_state_of_new_rank(state: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the random state of a new rank: seeds drawn from rank 0's state and the rank's number.

    The loader's own generators keep rank 0's state: ranks that shuffle must draw the same order.
    """
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + rank.to_bytes(4, "little")).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    new = state | {
        "python": random.Random(seed).getstate(),  # noqa: S311 - training, not cryptography
        "torch": torch.Generator().manual_seed(seed).get_state(),
    }
    if "numpy" in state:
        numpy = np.random.RandomState(seed & 0xFFFFFFFF)
        new["numpy"] = arrays_to_tensors(numpy.get_state(legacy=False))
    if "cuda" in state and torch.cuda.is_available():
        new["cuda"] = [torch.Generator("cuda").manual_seed(seed).get_state()]
    return new
