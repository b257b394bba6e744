"""Shard the models of an unmodified script at the moment when it creates their optimizer.

    Optimizer(parameters) ─┬─> memfit.apply(model, plan)   in a process group that memfit joins
                           ├─> parameters of the shards    fsdp2: the optimizer takes them in their place
                           └─> ZeroRedundancyOptimizer     zero1: the script gets it in the optimizer's place

    model(x) ──> DistributedDataParallel(x) ──> model(x)    ddp, zero1: the script still calls the model

The memory is that of a script which calls ``memfit.apply`` just before it creates the optimizer. Every rank
has the script's whole batches, and computes its share of each (``forward_of_rank``).
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from memfit.errors import UsageError
from memfit.injection.route_through_ddp import route_through_ddp
from memfit.injection.state_of_ranks import install_state_of_ranks, take_shards_when_loading
from memfit.injection.what_ranks_share import WhatRanksShare
from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.strategies.apply import apply
from memfit.strategies.mechanisms.forward_of_rank import (
    ForwardOfRank,
    Reduction,
    ShareOfRank,
    batch_norms_in_training,
)
from memfit.strategies.mechanisms.module_patterns import class_name
from memfit.strategies.mechanisms.wrap_forward import wrap_forward
from memfit.strategies.plan import Plan
from memfit.strategies.sharding import Sharding, sharding_of_model
from memfit.units import format_bytes

_DDP = Patch("torch.nn.parallel.distributed:DistributedDataParallel", "__init__", why="shard in its place")
_OPTIMIZER = Patch("torch.optim.optimizer:Optimizer", "__new__", why="shard optimizer state over ranks")
_AUTOGRAD = Patch("torch.autograd", "grad", why="refuse gradients that ranks have not reduced")

_NEGLIGIBLE = 0.01
"""Share of the parameters' bytes that a script may keep as they were before."""
_NAMED = 3
"""Parameters that a reason names."""
_LINKS = {"DistributedDataParallel": "DistributedDataParallel", "FullyShardedDataParallel": "FSDP"}


class ShardingInjector:
    """Shards models, and gives their optimizers what belongs to the shards.

    Args:
        sharding: how.
        plan: the strategies to apply with it, the sharding included.
        refuse: called with the reason if the script and the sharding do not suit each other.
        on_change: called when ``shares`` change.
        trains: whether all ranks run, and train.
    """

    def __init__(
        self,
        sharding: Sharding,
        plan: Plan,
        refuse: Callable[[str], None],
        on_change: Callable[[], None],
        *,
        trains: bool = False,
    ) -> None:
        self._sharding = sharding
        self._plan = plan
        self._refuse, self._on_change = refuse, on_change
        self._share = ShareOfRank(refuse)
        self._shared = WhatRanksShare() if trains else None
        if self._shared is not None:
            self._shared.seed()
            self._share = ShareOfRank(refuse, self._shared.difference)
        self._norms: list[str] = []
        self._joined = False
        self._models: list[weakref.ref[nn.Module]] = []
        self._shards: Any = WeakTensorKeyDictionary()  # a parameter before -> after
        self._bytes_before = 0  # of the former
        self._creating = self._checked = self._hooked = False
        self._created: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._shares: list[int] = []

    def install(self, hooks: InstalledHooks) -> None:
        """Hook what the script may shard itself and, with zero1, the creation of optimizers."""
        hooks.wrap(_DDP, "__init__", self._wrapped)
        install_state_of_ranks(hooks)
        hooks.wrap(_AUTOGRAD, "grad", self._grad)
        hooks.on_removal(register_optimizer_step_pre_hook(self._check_parameters).remove)
        if self._sharding.mode == "zero1":
            hooks.replace(_OPTIMIZER, "__new__", lambda _: staticmethod(self._new_optimizer))
        if self._sharding.mode == "fsdp2":
            hooks.on_removal(register_optimizer_step_pre_hook(self._check_released).remove)

    @property
    def shares(self) -> tuple[int, ...]:
        """Bytes of parameters whose optimizer state each rank holds; empty if all hold as much."""
        return tuple(self._shares)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a rank computes otherwise than one process would."""
        if not self._norms:
            return ()
        others = f" and {len(self._norms) - 1} others" if self._norms[1:] else ""
        note = (
            f"{self._norms[0]}{others} normalise the samples of each rank apart. If the script calls "
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model), they normalise the whole batch."
        )
        return (note,)

    def has(self, model: nn.Module) -> bool:
        """Whether a model, or the model that it wraps, has been sharded."""
        return any(reference() in set(model.modules()) for reference in self._models)

    def is_ready(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer was created already: Python initialises it once more."""
        return optimizer in self._created

    def shard(self, model: nn.Module) -> None:
        """Apply the plan to a model.

        Raises:
            UsageError: the script shards it itself, or the plan does not suit it.
        """
        own = self._own_sharding(model)
        if not dist.is_initialized():
            dist.init_process_group()
            self._joined = True
        before = dict(model.named_parameters(remove_duplicate=False))
        self._hooked |= any(each._backward_hooks for each in before.values())
        sizes = {name: _bytes_of(parameter) for name, parameter in before.items()}
        if own is not None:
            apply(model, replace(self._plan, sharding=None))
        else:
            if self._sharding.split_batch is not False:
                self._norms += batch_norms_in_training(model)
            sharded = apply(model, replace(self._plan, sharding=self._without_split()))
            if self._sharding.split_batch is not False:
                reduction = None if self._sharding.mode == "fsdp2" else Reduction()
                wrap_forward(model, replace(self._share, reduction=reduction), ForwardOfRank)
            elif self._shared is not None:
                self._shared.seed(own=True)
            take_shards_when_loading(model)
            self._refuse_copies(model)
            if isinstance(sharded, DistributedDataParallel) and sharded is not model:
                route_through_ddp(model, sharded, self._in_another_ddp, self._end, self._sharding.mode)
        after = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in before.items():
            if after[name] is not parameter and parameter not in self._shards:
                self._shards[parameter] = after[name]
                self._bytes_before += sizes[name]
        self._models.append(weakref.ref(model))

    def _without_split(self) -> Sharding:
        """Return how a model is sharded whose batches are split here.

        Between its calls it holds shards: the script would read and change gathered parameters in vain.
        """
        fsdp2 = self._sharding.mode == "fsdp2"
        if fsdp2 and self._sharding.reshard_after_forward not in (None, True):
            raise UsageError(
                "sharding: with reshard_after_forward=False, what the script changes of the model between "
                "its calls would be lost. Leave it out."
            )
        return replace(self._sharding, split_batch=None, reshard_after_forward=fsdp2 or None)

    def of_shards(self, parameters: list[Any]) -> list[Any]:
        """Return an optimizer's listed parameters with shards in place of what was sharded."""

        def shard_of(entry: Any) -> Any:
            if isinstance(entry, dict):
                entry["params"] = self.of_shards(entry["params"])
                return entry
            if isinstance(entry, tuple):  # with the parameter's name
                return (entry[0], shard_of(entry[1]))
            return self._shards.get(entry, entry)

        return [shard_of(entry) for entry in parameters]

    def put_shards_in_containers(self) -> None:
        """Put shards in place of the parameters that lists and dicts of the script keep, or tuples in them.

        They exist from before the optimizer, for clipping or weight decay, and would miss all gradients.
        """
        kept = tuple(self._shards.items())
        shards = {id(parameter): shard for parameter, shard in kept}

        def of(value: Any) -> Any:
            if type(value) is tuple and any(id(each) in shards for each in value):
                return tuple(map(of, value))
            return shards.get(id(value), value)

        for each in gc.get_objects() if kept else ():
            is_dict = issubclass(type(each), dict)  # whose own items() may load something
            if is_dict or issubclass(type(each), list):
                for place, value in [*(dict.items(each) if is_dict else enumerate(list.__iter__(each)))]:
                    if (new := of(value)) is not value:
                        each[place] = new

    def _own_sharding(self, model: nn.Module) -> Sharding | None:
        """Return how the script shards a model, if memfit can shard its optimizer nevertheless."""
        name = class_name(model.module if isinstance(model, DistributedDataParallel) else model)
        kinds = {class_name(module) for module in model.modules()} & _LINKS.keys()
        own = sharding_of_model(model)
        if own is not None and own.mode == "ddp" and self._sharding.mode == "zero1":
            return own
        if own is not None or kinds or any(isinstance(each, DTensor) for each in model.parameters()):
            by = _LINKS[min(kinds)] if kinds else "fully_shard" if own is not None else "DTensor"
            raise UsageError(
                f"the script itself shares {name} among ranks, by {by}. To compare other shardings, remove "
                "it."
            )
        if dist.is_initialized() and not self._joined:
            raise UsageError(
                f"the script, or a trainer that it uses, joins a process group itself, and {name} is in no "
                "DistributedDataParallel when its optimizer is created. memfit does not know how its ranks "
                "share gradients. Trainers (transformers, Lightning, Accelerate) have options for shards."
            )
        on_gpu = torch.cuda.is_available()
        if on_gpu and any(parameter.device.type != "cuda" for parameter in model.parameters()):
            raise UsageError(
                f"{name} is not on the GPU yet when its optimizer is created. Move it to the GPU before "
                "that line."
            )
        return None

    def _in_another_ddp(self, model: nn.Module) -> nn.Module:
        self._creating = True
        try:
            return self._without_split().shard(model)
        finally:
            self._creating = False

    def _refuse_copies(self, model: nn.Module) -> None:
        """Refuse copies of what fully_shard has changed."""

        def refuse(copied: nn.Module, _: Any) -> None:
            name = class_name(copied).removeprefix("FSDP")
            why = (
                f"sharding: the script copies {name}, which fsdp2 has sharded. Copy it before the optimizer "
                "is created, or use zero1 or ddp."
            )
            self._end(why)

        kinds: set[Any] = {type(each) for each in model.modules() if isinstance(each, FSDPModule)}
        for kind in kinds:  # fully_shard has made them
            kind.__deepcopy__ = refuse

    def _wrapped(
        self, original: Callable[..., None], wrapper: Any, module: nn.Module, *args: Any, **kw: Any
    ) -> None:
        if self.has(module) and not self._creating:
            self._refuse(
                f"the script itself trains {class_name(module)} in a DistributedDataParallel, created after "
                "its optimizer."
            )
        original(wrapper, module, *args, **kw)

    def _new_optimizer(self, kind: type[torch.optim.Optimizer], *args: Any, **kwargs: Any) -> Any:
        """Create an optimizer; of a sharded model, one that shards its state."""
        optimizer = object.__new__(kind)
        if self._creating or not (args or kwargs) or issubclass(kind, ZeroRedundancyOptimizer):
            return optimizer  # a copy has no arguments
        self._creating = True
        try:
            kind.__init__(optimizer, *args, **kwargs)  # shards the models that it trains
            self._created.add(optimizer)
            model = next((each for one in self._models if (each := one()) and _trains(optimizer, each)), None)
            if model is None:
                return optimizer
            sharded = self._sharding.optimizer(optimizer, model)
        except UsageError as error:
            self._refuse(str(error))
            return optimizer
        finally:
            self._creating = False
        self._add_shares(sharded)
        return sharded

    def _add_shares(self, optimizer: Any) -> None:
        shares = [
            sum(each.numel() * each.element_size() for group in groups for each in group["params"])
            for groups in optimizer._partition_parameters()
        ]
        self._shares = [sum(pair) for pair in zip(self._shares or [0] * len(shares), shares, strict=True)]
        self._on_change()

    def _grad(
        self, original: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse gradients of parameters that no backward writes: they would be those of the rank's share."""
        inputs = inputs if isinstance(inputs, torch.Tensor) else tuple(inputs)
        own = set(map(id, self._parameters()))
        if any(id(each) in own for each in (inputs if isinstance(inputs, tuple) else (inputs,))):
            self._end(
                "sharding: torch.autograd.grad of a parameter is that of a rank's share of the batch. Call "
                "backward, which reduces gradients, and read parameter.grad."
            )
        return original(outputs, inputs, *args, **kwargs)

    def _check_parameters(self, *_: Any) -> None:
        """Refuse parameters that fsdp2 has not sharded, and hooks, whose gradients are not reduced yet."""
        parameters = [*self._parameters()]
        whole = next((each for each in parameters if not isinstance(each, DTensor)), None)
        if whole is not None and self._sharding.mode == "fsdp2":
            self._end(
                f"sharding: {self._name_of(whole)} came into the model after its first optimizer was "
                "created, which is when fsdp2 shards it. Create the optimizer later, or use ddp or zero1."
            )
        if self._hooked or any(each._backward_hooks for each in parameters):
            self._end(
                "sharding: the script has registered a hook on a parameter, which would change the gradient "
                "of a rank's share. Change parameter.grad between backward and the optimizer's step."
            )

    def _parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the sharded models."""
        for reference in self._models:
            if (model := reference()) is not None:
                yield from model.parameters()

    def _end(self, why: str) -> NoReturn:
        self._refuse(why)
        raise UsageError(why)

    def _check_released(self, *_: Any) -> None:
        """Refuse a script that keeps parameters that its model had before it was sharded.

        A loop's variable may keep a small one: it is in the figures, which it hardly changes.
        """
        if self._checked:
            return
        self._checked = True
        if len(self._shards):
            gc.collect()
        kept = sorted((_bytes_of(each), self._name_of(shard)) for each, shard in self._shards.items())
        amount = sum(size for size, _ in kept)
        if amount > _NEGLIGIBLE * self._bytes_before:
            named = ", ".join(f"{name} ({format_bytes(size)})" for size, name in kept[: -_NAMED - 1 : -1])
            others = f" and {len(kept) - _NAMED} others" if len(kept) > _NAMED else ""
            self._refuse(
                f"the script keeps {format_bytes(amount)} of the parameters that its model had before the "
                f"optimizer was created, so they stay in memory: {named}{others}. Delete the variables that "
                "refer to them, such as that of a loop, before the optimizer is created."
            )

    def _name_of(self, shard: nn.Parameter) -> str:
        models = (model for reference in self._models if (model := reference()) is not None)
        named = (pair for model in models for pair in model.named_parameters())
        return next((name for name, each in named if each is shard), "one of a deleted model")


def _bytes_of(parameter: nn.Parameter) -> int:
    return parameter.untyped_storage().nbytes()


def _trains(optimizer: torch.optim.Optimizer, model: nn.Module) -> bool:
    ours = set(map(id, model.parameters()))
    return any(id(each) in ours for group in optimizer.param_groups for each in group["params"])
