"""Training on several GPUs: each rank has a batch, or a share of one, and the ranks share what they hold.

                 parameters     gradients      optimizer state    between the ranks
    ddp          all            all            all                all-reduce of gradients
    zero1        all            all            1/N                the same, and broadcast of parameters
    fsdp2        1/N            1/N            1/N                all-gather of parameters, reduce-scatter

These are PyTorch's DistributedDataParallel, ZeroRedundancyOptimizer and fully_shard, whose arguments have the
same names here. Each gives the gradients of one process with all batches, up to rounding. With
``dp_replicate``, fsdp2 shards within groups of ranks and replicates between them (hybrid sharding, HSDP).
"""

import sys
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import UsageError
from memfit.ghost.ranks.collective_release_times import release_first_buckets
from memfit.recording.optimizer_accessors import parameters_of
from memfit.strategies.mechanisms.forward_of_rank import ForwardOfRank, ShareOfRank
from memfit.strategies.mechanisms.module_patterns import class_name, modules_named, repeated_blocks
from memfit.strategies.mechanisms.wrap_forward import wrap_forward
from memfit.strategies.precision import DTYPES, Dtype
from memfit.strategies.setting_checks import check_setting_types

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

Mode = Literal["ddp", "zero1", "fsdp2"]

_OF_FSDP2 = (
    "modules",
    "reshard_after_forward",
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
    "cast_forward_inputs",
    "offload",
    "dp_replicate",
)
_OF_DDP = ("gradient_as_bucket_view", "bucket_cap_mb", "find_unused_parameters", "static_graph")


@dataclass(frozen=True, slots=True)
class Sharding:
    """Settings of data parallelism, after their names in PyTorch.

    Raises:
        UsageError: a setting is not one of the mode's, or is out of range.

    >>> Sharding("fsdp2", modules="layers.*").modules
    ('layers.*',)
    """

    mode: Mode = "ddp"
    split_batch: bool | None = None
    """Whether every rank is passed the whole batch and computes its share of it inside the model's call, as a
    script for one GPU needs it. None: in such a script, which memfit shards, and not in loops of your own."""
    modules: str | tuple[str, ...] = ()
    """fsdp2: the modules whose parameters are gathered together, by name, pattern or class; without it, the
    blocks that the model repeats. What remains is a group of its own."""
    reshard_after_forward: bool | int | None = None
    """fsdp2: whether parameters are freed after forward and gathered again in backward; a number keeps them
    sharded over so many ranks. None: in all groups but the last, which backward needs at once; in that too
    with ``split_batch``, because a loop for one process reads and changes the model between its calls."""
    param_dtype: Dtype | None = None
    """fsdp2, as in MixedPrecisionPolicy: in which parameters are gathered and computed with. Their shards,
    which the optimizer updates, keep their own."""
    reduce_dtype: Dtype | None = None
    """fsdp2: in which gradients are reduced; ``param_dtype`` by default."""
    output_dtype: Dtype | None = None
    """fsdp2: of the model's results."""
    cast_forward_inputs: bool = True
    """fsdp2: whether inputs are cast to ``param_dtype``."""
    offload: bool = False
    """fsdp2: keep sharded parameters, gradients and the optimizer's state on the host (CPUOffloadPolicy)."""
    dp_replicate: int = 1
    """fsdp2: how many groups of ranks hold the parameters; each rank holds a share of its group's."""
    gradient_as_bucket_view: bool = True
    """ddp, zero1: keep gradients in the buckets that are reduced, and not beside them."""
    bucket_cap_mb: int | None = None
    """ddp, zero1: MiB of a bucket; 25 by default."""
    find_unused_parameters: bool = False
    """ddp, zero1: whether parameters may get no gradient in a backward."""
    static_graph: bool = False
    """ddp, zero1: whether every step uses the same parameters in the same order."""

    def __post_init__(self) -> None:
        """Check."""
        check_setting_types(self, "sharding")
        if isinstance(self.modules, str):
            object.__setattr__(self, "modules", (self.modules,))
        defaults = {field.name: field.default for field in fields(self)}
        of_others = _OF_DDP if self.mode == "fsdp2" else _OF_FSDP2
        for name in of_others:
            if getattr(self, name) != defaults[name]:
                theirs = "fsdp2" if name in _OF_FSDP2 else "ddp and zero1"
                raise UsageError(
                    f"sharding: {name} is a setting of {theirs}, not of {self.mode}. Leave it out, or choose "
                    f"another mode."
                )
        for name in ("dp_replicate", "bucket_cap_mb"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"sharding: '{name}' must be an integer of at least 1, not {value!r}.")

    def shard(self, model: nn.Module) -> nn.Module:
        """Return the model to train: with ddp and zero1 in a DistributedDataParallel.

        With fsdp2 the model itself, whose parameters are now DTensors: create the optimizer afterwards.

        Raises:
            UsageError: there is no process group, the ranks cannot be divided, no module matches, or the
                model is sharded already.
        """
        if not has_process_group():
            raise UsageError(
                "sharding needs a process group, and none is initialised. Call "
                "torch.distributed.init_process_group() before, and start the script with torchrun "
                "--nproc-per-node N SCRIPT, or memfit dry-run --nproc N SCRIPT."
            )
        if self.split_batch:
            wrap_forward(model, ShareOfRank(), ForwardOfRank)
        if self.mode == "fsdp2":
            self._fully_shard(model, world_size())
            return model
        release_first_buckets()
        return DistributedDataParallel(
            model,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
        )

    def optimizer(self, optimizer: "Optimizer", model: nn.Module) -> "Optimizer":
        """Return the optimizer that trains a sharded model: with zero1, one that shards its state.

        Args:
            optimizer: before its first step, and before a scheduler is made for it.
            model: as ``memfit.apply`` returned it.

        Raises:
            UsageError: it does not hold the model's parameters, or has already stepped.

        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters())
        >>> Sharding("ddp").optimizer(optimizer, model) is optimizer
        True
        """
        check_optimizer_holds_parameters_of(model, optimizer)
        return optimizer if self.mode != "zero1" else _zero1(optimizer)

    def _fully_shard(self, model: nn.Module, size: int) -> None:
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            FSDPModule,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        if any(isinstance(module, FSDPModule) for module in model.modules()):
            raise UsageError(f"sharding: {class_name(model)} is already sharded by fully_shard.")
        parts = modules_named(model, self.modules, "sharding") if self.modules else repeated_blocks(model)
        for name, module in parts.items():
            if isinstance(module, nn.ModuleList | nn.ModuleDict):
                raise UsageError(
                    f"sharding: {name} is a {class_name(module)}, which has no forward; did you mean "
                    f"'{name}.*'?"
                )
        if scalars := [name for name, each in model.named_parameters() if not each.dim()]:
            raise UsageError(
                f"sharding: fsdp2 shards no parameter that is a single number, such as {scalars[0]}. Give it "
                "the shape (1,), or use zero1 or ddp."
            )
        offloaded = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        precision = MixedPrecisionPolicy(
            param_dtype=_torch_dtype(self.param_dtype),
            reduce_dtype=_torch_dtype(self.reduce_dtype),
            cast_forward_inputs=self.cast_forward_inputs,
        )
        reshards = self.reshard_after_forward
        if reshards is None and self.split_batch:
            reshards = True
        policies: dict[str, Any] = {
            "mesh": self._mesh(model, size),
            "reshard_after_forward": reshards,
            "offload_policy": offloaded if self.offload else OffloadPolicy(),
        }
        for module in reversed(parts.values()):  # the innermost first
            fully_shard(module, mp_policy=precision, **policies)
        results = replace(precision, output_dtype=_torch_dtype(self.output_dtype))
        fully_shard(model, mp_policy=results, **policies)

    def _mesh(self, model: nn.Module, size: int) -> "DeviceMesh":
        from torch.distributed.device_mesh import init_device_mesh

        if size % self.dp_replicate:
            raise UsageError(
                f"sharding: dp_replicate={self.dp_replicate} does not divide the {size} ranks of the process "
                "group."
            )
        kinds = {parameter.device.type for parameter in model.parameters()} - {"meta"}
        device = kinds.pop() if len(kinds) == 1 else "cuda" if torch.cuda.is_available() else "cpu"
        if self.dp_replicate == 1:
            return init_device_mesh(device, (size,), mesh_dim_names=("dp_shard",))
        shape = (self.dp_replicate, size // self.dp_replicate)
        return init_device_mesh(device, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def sharding_of_model(model: nn.Module) -> Sharding | None:
    """Return how a model is sharded already, by its classes; None if it is not.

    >>> sharding_of_model(nn.Linear(2, 2)) is None
    True
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            return Sharding("ddp", static_graph=module.static_graph)
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            return Sharding("fsdp2")
    return None


def module_inside_ddp(model: nn.Module) -> nn.Module:
    """Return the module that a DistributedDataParallel wraps; the module itself if it is none."""
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    return inside if isinstance(inside, nn.Module) else model


def has_process_group() -> bool:
    """Return whether PyTorch's default process group is initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return torch.distributed.get_world_size() if has_process_group() else 1


def _torch_dtype(name: Dtype | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, DTYPES[name])


def check_optimizer_holds_parameters_of(model: nn.Module, optimizer: "Optimizer") -> None:
    """Check that an optimizer holds parameters of a sharded model."""
    ours = {id(parameter) for parameter in model.parameters()}
    if not any(id(each) in ours for each in parameters_of(optimizer)):
        raise UsageError(
            f"The optimizer holds no parameter of {class_name(model)}. fsdp2 replaces parameters by "
            "their shards: create the optimizer after memfit.apply, from model.parameters()."
        )


def _zero1(optimizer: "Optimizer") -> "Optimizer":
    """Return a ZeroRedundancyOptimizer of the same class, groups and hyperparameters."""
    import inspect

    from torch.distributed.optim import ZeroRedundancyOptimizer

    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer
    if optimizer.state:
        raise UsageError(
            f"{type(optimizer).__name__} already has state, which zero1 would lose. Shard the optimizer "
            "before its first step; load a saved state afterwards."
        )
    taken = inspect.signature(type(optimizer)).parameters
    known: dict[str, Any] = {name: each for name, each in optimizer.defaults.items() if name in taken}
    groups = [
        {name: each for name, each in group.items() if name == "params" or name in taken}
        for group in optimizer.param_groups
    ]
    return ZeroRedundancyOptimizer(groups, type(optimizer), **known)
