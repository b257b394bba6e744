"""From a job and a plan to what an engine works with: strategies are applied, in the order that they need.

float32 copies -> model cast, checkpointed, ... -> optimizer -> copies handed to it -> scheduler -> sums ->
graphs
"""

import warnings
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.apply import apply_to_model
from memfit.strategies.plan import Plan
from memfit.strategies.precision import Precision
from memfit.train import masters
from memfit.train.gradients import gradient_sums
from memfit.train.graphs import graphs
from memfit.train.job import Job, Loss
from memfit.train.scaler import Scaler
from memfit.train.update import Protect, Update


def job_of(
    job: Job | nn.Module, optimizer: Any, loss: Loss | None, scheduler: Any, max_grad_norm: float | None
) -> Job:
    """Return a job, given or made of its parts.

    Raises:
        UsageError: parts are missing, or given twice.
    """
    if isinstance(job, nn.Module):
        if optimizer is None:
            raise UsageError("Engine(model, plan) needs an optimizer beside the model: optimizer=...")
        return Job(job, optimizer, loss, scheduler, max_grad_norm)
    if any(part is not None for part in (optimizer, loss, scheduler, max_grad_norm)):
        raise UsageError(
            "Engine(job, plan): the job has its own optimizer, loss, scheduler and max_grad_norm."
        )
    return job


def set_up(
    job: Job, plan: Plan, max_grad_norm: float | None, *, cuda_graphs: bool, protect: Protect
) -> Update:
    """Apply a plan to a job's model and optimizer; return what updates them.

    Raises:
        UsageError: it does not suit them.
    """
    model, precision = job.model, plan.precision or Precision("fp32")
    accumulation = plan.accumulation or Accumulation(gradient_accumulation_steps=1)
    full = masters.copies(model.parameters()) if precision.master_weights else {}
    apply_to_model(model, plan)
    made = job.optimizer
    optimizer = made if isinstance(made, torch.optim.Optimizer) else made(model.parameters())
    if plan.optimizer_state is not None:
        plan.optimizer_state.optimizer(optimizer, model)
    masters.hand_over(optimizer, full)
    in_backward = plan.optimizer_state is not None and plan.optimizer_state.step_in_backward
    sums = gradient_sums(model, accumulation, full)
    if cuda_graphs:
        for there, what in (
            (precision.loss_scale, "fp16: the host reads whether a step is applied; choose bf16"),
            (sums, "gradients that are summed in another dtype, as master weights need"),
            (in_backward, "step_in_backward"),
        ):
            if there:
                raise UsageError(f"cuda_graphs cannot be with {what}.")
    if accumulation.several:
        _warn_of_batch_norms(model)
    return Update(
        optimizer,
        job.scheduler(optimizer) if callable(job.scheduler) else job.scheduler,
        Scaler(precision.loss_scale, next(model.parameters()).device.type),
        sums,
        full,
        max_grad_norm=max_grad_norm,
        protect=protect,
        graphs=graphs(optimizer) if cuda_graphs else None,
        in_backward=in_backward,
    )


def _warn_of_batch_norms(model: nn.Module) -> None:
    modules = model.named_modules()
    names = [name for name, module in modules if isinstance(module, _BatchNorm) and module.training]
    if names:
        warnings.warn(
            f"{len(names)} batch norms ({names[0]}, ...) will see micro-batches, so that accumulation does "
            "not equal the whole batch. Alternatives: GroupNorm or LayerNorm, frozen statistics "
            "(module.eval()), or SyncBatchNorm on several GPUs.",
            stacklevel=4,
        )
