"""The parts of an engine that are saved, and the names under which they are saved.

The names are the same in any engine made of the same model, optimizer and plan.

ZeRO-1's ``ZeroRedundancyOptimizer`` has an inner optimizer on each rank, for the parameters that this rank
updates. Its own ``state_dict`` first gathers the states of all ranks on one, which may not have the memory.

                     param_groups of all parameters          inner optimizer of rank 1
    index            0         1         2                   0
    parameter        weight    bias      head                bias
    state            -         here      -                   exp_avg, exp_avg_sq, step
"""

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memfit.recording.optimizer_accessors import local_optimizer, parameters_of
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.mechanisms.module_patterns import module_without_compile_wrapper
from memfit.strategies.plan import Plan
from memfit.train.accumulation_ledger import AccumulationLedger
from memfit.train.batch_updates_with_retry import DividedBatchStepper
from memfit.train.callbacks import Callback
from memfit.train.ranks.rank_agreement import SingleRank


@dataclass(slots=True, eq=False)
class EngineParts:
    """The parts of an engine; resuming changes them in place, and sets ``epoch``."""

    model: nn.Module
    plan: Plan
    optimizer: torch.optim.Optimizer
    scheduler: Any
    callbacks: tuple[Callback, ...]
    accumulation: Accumulation
    ledger: AccumulationLedger
    full_batch: DividedBatchStepper
    ranks: SingleRank
    epoch: int

    @property
    def steps(self) -> int:
        """Micro-batches of a window."""
        return self.accumulation.steps


def model_without_wrappers(parts: EngineParts) -> nn.Module:
    """Return the model inside torch.compile's and DistributedDataParallel's wrappers.

    Its parameters are the shards that fully_shard made, and not what a forward gathered.
    """
    model = module_without_compile_wrapper(parts.model)
    if isinstance(model, DistributedDataParallel):
        model = module_without_compile_wrapper(model.module)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()
    return model


def named_model_and_optimizer_parameters(parts: EngineParts) -> dict[str, nn.Parameter]:
    """Return the model's parameters by name, and the optimizer's others, such as a loss's, by index."""
    found = dict(model_without_wrappers(parts).named_parameters())
    known = {id(parameter) for parameter in (*found.values(), *parts.ledger.update.masters.values())}
    for number, group in enumerate(parts.optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                found[f"param_groups[{number}][{index}]"] = parameter
    return found


def tensors_outside_state_dict(parts: EngineParts) -> dict[str, torch.Tensor]:
    """Return what the model's ``state_dict`` leaves out: a loss's parameters, non-persistent buffers."""
    model = model_without_wrappers(parts)
    known = model.state_dict().keys()
    found = (*named_model_and_optimizer_parameters(parts).items(), *model.named_buffers())
    return {name: tensor for name, tensor in found if name not in known}


def parameter_names_by_group(parts: EngineParts) -> list[list[str]]:
    """Return the names of the parameters in each group; float32 copies have their parameters' names."""
    masters = parts.ledger.update.masters
    names = {
        id(masters.get(parameter, parameter)): name
        for name, parameter in named_model_and_optimizer_parameters(parts).items()
    }
    return [[names[id(each)] for each in group["params"]] for group in parts.optimizer.param_groups]


def gradient_precision_of(parts: EngineParts) -> dict[str, Any]:
    """Return what a window's gradients depend on besides the loss scale, as plain values."""
    precision = parts.plan.precision
    low = precision is not None and precision.autocast and precision.dtype != "fp32"
    return {
        "parameters": sorted({str(parameter.dtype) for parameter in parts.model.parameters()}),
        "autocast": precision.dtype if precision is not None and low else None,
        "master_weights": bool(parts.ledger.update.masters),
        "gradient_dtype": parts.accumulation.gradient_dtype,
    }


def class_name_with_module(value: object) -> str:
    """Return the name of an object's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


# ---- The state of an optimizer on this rank, with the indices of all parameters ---------------------------


def indices_of_own_parameters(optimizer: Optimizer) -> list[int]:
    """Return the indices, among all parameters, of those that this rank updates, in its own order."""
    index = {id(parameter): number for number, parameter in enumerate(parameters_of(optimizer))}
    return [index[id(parameter)] for parameter in parameters_of(local_optimizer(optimizer))]


def get_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's ``state_dict`` with the states of the parameters that this rank updates."""
    local = local_optimizer(optimizer)
    if local is optimizer:
        return optimizer.state_dict()
    own, state = indices_of_own_parameters(optimizer), local.state_dict()["state"]
    return {
        "state": {own[number]: each for number, each in state.items()},
        "param_groups": Optimizer.state_dict(optimizer)["param_groups"],
    }


def optimizer_state_of_own_parameters(optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a saved ``state_dict`` that this rank's optimizer loads, with its own indices."""
    local = local_optimizer(optimizer)
    if local is optimizer:
        return saved
    groups = local.state_dict()["param_groups"]
    return {
        "state": {
            number: saved["state"][index]
            for number, index in enumerate(indices_of_own_parameters(optimizer))
            if index in saved["state"]
        },
        "param_groups": [
            group | {"params": own["params"]}
            for group, own in zip(saved["param_groups"], groups, strict=True)
        ],
    }


def copy_hyperparameters_to_zero1_groups(optimizer: Optimizer) -> None:
    """Give ZeRO-1's groups, as new ones, the hyperparameters that its inner optimizer has loaded."""
    local = local_optimizer(optimizer)
    if local is not optimizer:
        optimizer.param_groups = [
            loaded | {"params": group["params"]}
            for group, loaded in zip(optimizer.param_groups, local.param_groups, strict=True)
        ]
