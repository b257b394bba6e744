"""Set up an engine, on one rank or several: apply its plan in the order that the strategies need.

float32 copies -> model cast, checkpointed, ... -> sharded -> optimizer, given the copies -> sums -> scheduler
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from weakref import ref

import torch
from torch import nn
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import UsageError
from memfit.recording.optimizer_accessors import local_optimizer, parameters_of
from memfit.strategies import apply
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.mechanisms.master_weights import (
    float32_copies,
    replace_optimizer_parameters,
    round_copies_into_parameters,
)
from memfit.strategies.mechanisms.module_patterns import class_name, module_without_compile_wrapper
from memfit.strategies.mechanisms.split_batch import warn_of_batch_norms
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.plan import Plan, sharding_conflict
from memfit.strategies.precision import Precision, device_type_of_model
from memfit.strategies.sharding import (
    Sharding,
    check_optimizer_holds_parameters_of,
    module_inside_ddp,
    sharding_of_model,
    world_size,
)
from memfit.train.loss_scaler import LossScaler
from memfit.train.optimizer_update import OptimizerUpdate, Protect
from memfit.train.ranks.rank_agreement import (
    SingleRank,
    engine_settings_as_text,
    optimizer_settings_as_text,
    ranks_of_job,
)
from memfit.train.ranks.rank_gradients import BUCKET_BYTES, RankGradients, ReplicaGradients, ShardGradients
from memfit.train.training_job import Job, learning_rate_schedule_of
from memfit.train.window_gradients import gradient_sums_of_model

_CALL = "memfit.Engine"  # as errors name it


PreparedEngineParts = tuple[nn.Module, OptimizerUpdate, RankGradients]
"""A job's model, with ``Sharding("ddp")`` in a DistributedDataParallel, and what an engine trains it with."""


def set_up_engine(
    job: Job,
    plan: Plan,
    max_grad_norm: float | None,
    *,
    retry: bool,
    protect: Protect,
    arena: bool,
) -> PreparedEngineParts:
    """Apply a plan to a job's model and optimizer; with several ranks, all of them call this.

    Raises:
        UsageError: the plan does not suit them, or the ranks have different settings.
    """
    _check_trainable_by_ranks(job.model, plan, arena=arena)
    ranks = ranks_of_job()
    options = {
        "max_grad_norm": max_grad_norm,
        "scheduler_interval": job.scheduler_interval,
        "scheduler_metric": job.scheduler_metric,
        "retry": retry,
        "protect": protect,
    }
    ranks.agree(_CALL, same=partial(engine_settings_as_text, job.model, plan, options))
    with ExitStack() as undo:
        undo.callback(apply.revert, job.model)
        try:
            model, update, gradients = _set_up(job, plan, ranks, max_grad_norm, protect)
        except Exception as error:
            ranks.report(error, _CALL, waiting=False)  # the others may be inside a broadcast
            raise
        ranks.agree(_CALL, same=partial(optimizer_settings_as_text, update.optimizer, update.scheduler))
        undo.pop_all()
    return model, update, gradients


def _set_up(
    job: Job, plan: Plan, ranks: SingleRank, max_grad_norm: float | None, protect: Protect
) -> PreparedEngineParts:
    model, precision = job.model, plan.precision or Precision("fp32")
    accumulation = plan.accumulation or Accumulation()
    if plan.sharding is not None:
        _broadcast_model_from_first_rank(model, ranks)
    masters = float32_copies(model.parameters()) if precision.master_weights else {}
    plain = module_inside_ddp(model)
    applied = apply.apply_to_model(plain, replace(plan, sharding=None), in_engine=True)
    model = model if plan.sharding is None else plan.sharding.shard(model)
    gradients = _rank_gradients_of(model, ranks)
    optimizer = _optimizer_of_sharded_model(job, plan.sharding, model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times per step, but memfit.Engine processes each "
            "batch only once. Use your own training loop; memfit.apply(model, plan) works there."
        )
    _check_gradients_are_reduced(optimizer, plan.sharding, model, ranks)
    state = applied.optimizer_state or OptimizerState()
    on_optimizer = apply.apply_to_optimizer(optimizer, [model], state, masters=masters, guarded=False)
    if on_optimizer.offloaded is not None or on_optimizer.in_backward is not None:
        apply.add_step_to_revert(plain, on_optimizer.undo)
    if plan.sharding is not None and plan.sharding.mode == "zero1":  # without float32 copies
        optimizer = plan.sharding.optimizer(optimizer, model)
    sums = gradient_sums_of_model(model, accumulation, masters)
    if accumulation.several:
        warn_of_batch_norms(model, "each micro-batch of a window")
    update = OptimizerUpdate(
        optimizer,
        learning_rate_schedule_of(job, optimizer),
        LossScaler(precision.loss_scale, device_type_of_model(model), ranks),
        sums,
        masters,
        model,
        max_grad_norm=max_grad_norm,
        protect=protect,
        on_optimizer=on_optimizer,
        ranks=ranks,
    )
    if isinstance(gradients, ReplicaGradients):
        if local_optimizer(optimizer) is not optimizer:
            gradients.agree_before_broadcast(optimizer)
        update.gradients.kept = gradients.allocate() if sums is None else None
    _undo_on_revert(plain, update, gradients)
    return model, update, gradients


def _undo_on_revert(plain: nn.Module, update: OptimizerUpdate, gradients: RankGradients) -> None:
    """Have ``revert`` undo what an engine changes beside its strategies."""
    if update.masters:
        apply.add_step_to_revert(plain, partial(_restore_float32_parameters, ref(update)), last=True)
    if isinstance(gradients, ReplicaGradients):
        apply.add_step_to_revert(plain, gradients.deactivate)
    if isinstance(gradients, ShardGradients):
        apply.add_step_to_revert(plain, gradients.hook.remove)
    for hook in update.hooks():
        apply.add_step_to_revert(plain, hook.remove)


def _restore_float32_parameters(reference: "ref[OptimizerUpdate]") -> None:
    """Write the float32 copies to the model's parameters, and have the optimizer update those again."""
    update = reference()
    if update is not None:
        round_copies_into_parameters(update.masters)
        originals = {master: parameter for parameter, master in update.masters.items()}
        replace_optimizer_parameters(update.optimizer, originals)


_ADD_SHARDING = (
    "Add memfit.Sharding('ddp') to the plan: memfit.Engine(model, [memfit.Sharding('ddp'), ...], "
    "optimizer=lambda parameters: torch.optim.AdamW(parameters)). 'zero1' and 'fsdp2' need less memory."
)


def _check_trainable_by_ranks(model: nn.Module, plan: Plan, *, arena: bool) -> None:
    """Check that an engine can train a model on the ranks that there are."""
    found = sharding_of_model(model)
    if found is not None and plan.sharding is not None:
        raise UsageError(
            f"{class_name(model)} is sharded already, but the plan has {plan.sharding}, too. Use one."
        )
    sharding = plan.sharding or found
    if plan.sharding is not None and plan.sharding.split_batch:
        raise UsageError(
            "memfit.Engine cannot use split_batch: its ranks have batches of their own, of any sizes. "
            "Leave out split_batch, and give each rank its share of the data (DistributedSampler)."
        )
    if world_size() > 1 and sharding is None:
        raise UsageError(
            f"This process group has {world_size()} ranks, but nothing says how they share the training of "
            f"{class_name(model)}. {_ADD_SHARDING}"
        )
    if sharding is None:
        return
    if (
        found is not None
        and found.mode == "ddp"
        and not isinstance(module_without_compile_wrapper(model), DistributedDataParallel)
    ):
        raise UsageError(
            f"A part of {class_name(model)} is in a DistributedDataParallel. The engine reduces the "
            "gradients of a whole model: leave out the wrapper, and add memfit.Sharding('ddp') to the plan."
        )
    if conflict := sharding_conflict(plan, sharding):
        raise UsageError(conflict)
    state, precision = plan.optimizer_state, plan.precision
    for conflicts, what in (
        (
            found is not None and precision is not None and not precision.autocast,
            "Precision(autocast=False), which casts a model that is sharded already: have the plan shard it",
        ),
        (
            sharding.mode == "fsdp2" and state is not None and state.backend is not None,
            "OptimizerState(bits=...): low-bit optimizers fail on shards of different sizes",
        ),
        (arena, "an arena, which has not been tested with the buffers of collective operations"),
        (sharding.static_graph, "static_graph: the engine reduces gradients after the last backward"),
        (
            state is not None and state.step_in_backward,
            "step_in_backward: gradients are weighed by the data of all ranks when the last backward is done",
        ),
    ):
        if conflicts:
            raise UsageError(f"An engine cannot combine sharding with {what}. Leave out one of the two.")


def _broadcast_model_from_first_rank(model: nn.Module, ranks: SingleRank) -> None:
    """Give a model that is not sharded yet the parameters and buffers that it has on rank 0, on all ranks.

    As DistributedDataParallel does. fully_shard does not: of different weights it would make a patchwork.
    """
    if ranks.size > 1:
        named = [*model.named_parameters(), *model.named_buffers()]
        empty = {name for name, each in named if each.is_meta}
        group = torch.distributed.group.WORLD
        _sync_module_states(model, group, BUCKET_BYTES, 0, empty)  # type: ignore[arg-type]


def _rank_gradients_of(model: nn.Module, ranks: SingleRank) -> RankGradients:
    """Return how the gradients of a model become one mean."""
    inside = module_without_compile_wrapper(model)
    if isinstance(inside, DistributedDataParallel):
        if (own := inside.process_group.size()) != world_size():
            raise UsageError(
                f"The DistributedDataParallel has a group of {own} ranks, but the job has {world_size()}. "
                "An engine trains a model on all ranks of the job."
            )
        return ReplicaGradients(ranks, inside)
    if sharding_of_model(model) is None:
        return RankGradients(ranks)
    for own in _mesh_sizes(model):
        if own != world_size():
            raise UsageError(
                f"fully_shard divides parameters among {own} ranks, but the job has {world_size()}. An "
                "engine trains a model on all ranks: tensor and pipeline parallelism are not supported."
            )
    return ShardGradients(ranks, model)


def _check_gradients_are_reduced(
    optimizer: torch.optim.Optimizer, sharding: Sharding | None, model: nn.Module, ranks: SingleRank
) -> None:
    """Check that the gradients of all parameters of an optimizer are reduced."""
    if sharding is not None:
        check_optimizer_holds_parameters_of(model, optimizer)
    ours = set(model.parameters())
    others = [each for each in parameters_of(optimizer) if each not in ours]
    if others and ranks.size > 1 and sharding_of_model(model) is not None:
        raise UsageError(
            f"The optimizer updates a parameter of shape {tuple(others[0].shape)} that {class_name(model)} "
            "does not contain. Its gradient is not reduced, and would differ from rank to rank. Make it a "
            "parameter of the model."
        )


def _mesh_sizes(model: nn.Module) -> Iterator[int]:
    """Yield among how many ranks each fully sharded module divides the data.

    Source: ``FSDPState`` in torch/distributed/fsdp/_fully_shard/_fsdp_state.py, PyTorch 2.14.
    """
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
            if group is not None:
                yield group.mesh_info.mesh.size()


def _optimizer_of_sharded_model(
    job: Job, sharding: Sharding | None, model: nn.Module
) -> torch.optim.Optimizer:
    """Return a job's optimizer, made of the sharded model's parameters if the job has a function for it."""
    if not isinstance(job.optimizer, torch.optim.Optimizer):
        return job.optimizer(model.parameters())
    name = type(job.optimizer).__name__
    if sharding is not None and sharding.mode == "fsdp2":
        raise UsageError(
            f"Sharding('fsdp2') replaces the model's parameters, and this {name} holds the former ones. Pass "
            f"optimizer=lambda parameters: {name}(parameters, ...), which the engine calls afterwards."
        )
    if sharding is not None and sharding.mode == "zero1" and hasattr(job.scheduler, "step"):
        raise UsageError(
            f"Sharding('zero1') replaces this {name} by one that is sharded, but the scheduler holds the "
            "former. Pass scheduler=lambda optimizer: ..., which the engine calls afterwards."
        )
    return job.optimizer
