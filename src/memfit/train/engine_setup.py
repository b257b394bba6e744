"""Set up an engine: apply its plan in the order that the strategies need.

float32 copies -> model cast, checkpointed, ... -> sharded -> optimizer, given the copies -> sums -> scheduler
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from weakref import ref

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies import apply
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.mechanisms.master_weights import (
    float32_copies,
    replace_parameters,
    round_copies_into_parameters,
)
from memfit.strategies.mechanisms.optimizer_info import local_optimizer
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.plan import Plan
from memfit.strategies.precision import Precision, device_type_of_model
from memfit.strategies.sharding import module_inside_ddp
from memfit.train.cuda_graphs import make_step_cuda_graphs
from memfit.train.data.split_batch import warn_of_batch_norms
from memfit.train.job import Job, learning_rate_schedule_of
from memfit.train.loss_scaler import LossScaler
from memfit.train.optimizer_update import OptimizerUpdate, Protect
from memfit.train.ranks.job_ranks import OneRank, ranks_of_job
from memfit.train.ranks.rank_gradients import RankGradients, ReplicaGradients, ShardGradients
from memfit.train.ranks.rank_settings import engine_settings_as_text, optimizer_settings_as_text
from memfit.train.ranks.rank_setup import (
    broadcast_model_from_first_rank,
    check_gradients_are_reduced,
    check_trainable_by_ranks,
    optimizer_of_sharded_model,
    rank_gradients_of,
)
from memfit.train.window_gradients import GradientSums, gradient_sums_of_model

_CALL = "memfit.Engine"  # as errors name it


@dataclass(frozen=True, slots=True, eq=False)
class PreparedEngine:
    """What an engine trains with, when its plan is applied."""

    model: nn.Module
    """The job's; with ``Sharding("ddp")`` in a DistributedDataParallel."""
    update: OptimizerUpdate
    gradients: RankGradients


def set_up_engine(
    job: Job,
    plan: Plan,
    max_grad_norm: float | None,
    *,
    cuda_graphs: bool,
    retry: bool,
    protect: Protect,
    arena: bool,
) -> PreparedEngine:
    """Apply a plan to a job's model and optimizer; with several ranks, all of them call this.

    Raises:
        UsageError: the plan does not suit them, or the ranks have different settings.
    """
    check_trainable_by_ranks(job.model, plan, cuda_graphs=cuda_graphs, arena=arena)
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
            prepared = _set_up(job, plan, ranks, max_grad_norm, cuda_graphs=cuda_graphs, protect=protect)
        except Exception as error:
            ranks.report(error, _CALL, waiting=False)  # the others may be inside a broadcast
            raise
        optimizer, scheduler = prepared.update.optimizer, prepared.update.scheduler
        ranks.agree(_CALL, same=partial(optimizer_settings_as_text, optimizer, scheduler))
        undo.pop_all()
    return prepared


def _set_up(
    job: Job,
    plan: Plan,
    ranks: OneRank,
    max_grad_norm: float | None,
    *,
    cuda_graphs: bool,
    protect: Protect,
) -> PreparedEngine:
    model, precision = job.model, plan.precision or Precision("fp32")
    accumulation = plan.accumulation or Accumulation()
    if plan.sharding is not None:
        broadcast_model_from_first_rank(model, ranks)
    masters = float32_copies(model.parameters()) if precision.master_weights else {}
    plain = module_inside_ddp(model)
    applied = apply.apply_to_model(plain, replace(plan, sharding=None), in_engine=True)
    model = model if plan.sharding is None else plan.sharding.shard(model)
    gradients = rank_gradients_of(model, ranks)
    optimizer = optimizer_of_sharded_model(job, plan.sharding, model)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times per step, but memfit.Engine processes each "
            "batch only once. Use your own training loop; memfit.apply(model, plan) works there."
        )
    check_gradients_are_reduced(optimizer, plan.sharding, model, ranks)
    state = applied.optimizer_state or OptimizerState()
    on_optimizer = apply.apply_to_optimizer(optimizer, [model], state, masters=masters, guarded=False)
    if on_optimizer.offloaded is not None or on_optimizer.in_backward is not None:
        apply.add_step_to_revert(plain, on_optimizer.undo)
    if plan.sharding is not None and plan.sharding.mode == "zero1":  # without float32 copies
        optimizer = plan.sharding.optimizer(optimizer, model)
    sums = gradient_sums_of_model(model, accumulation, masters)
    if cuda_graphs:
        _expect_capturable(precision, sums, state)
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
        graphs=make_step_cuda_graphs(optimizer) if cuda_graphs else None,
        on_optimizer=on_optimizer,
        ranks=ranks,
    )
    if isinstance(gradients, ReplicaGradients):
        if local_optimizer(optimizer) is not optimizer:
            gradients.agree_before_broadcast(optimizer)
        update.gradients.kept = gradients.allocate() if sums is None else None
    _undo_on_revert(plain, update, gradients)
    return PreparedEngine(model, update, gradients)


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


def _expect_capturable(precision: Precision, sums: GradientSums | None, state: OptimizerState) -> None:
    for in_use, what in (
        (
            precision.loss_scale,
            "fp16: the CPU must read from the GPU whether to apply each step. Choose bf16",
        ),
        (sums, "gradients summed in another dtype (for master_weights, gradient_dtype or low precision)"),
        (state.step_in_backward, "step_in_backward"),
        (state.offload, "optimizer_state.offload: captured kernels read the state at a fixed address"),
    ):
        if in_use:
            raise UsageError(f"cuda_graphs cannot be combined with {what}.")


def _restore_float32_parameters(reference: "ref[OptimizerUpdate]") -> None:
    """Write the float32 copies to the model's parameters, and have the optimizer update those again."""
    update = reference()
    if update is not None:
        round_copies_into_parameters(update.masters)
        originals = {master: parameter for parameter, master in update.masters.items()}
        replace_parameters(update.optimizer, originals)
