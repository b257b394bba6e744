"""From a job and a plan to what an engine works with: strategies are applied, in the order that they need.

float32 copies -> model cast, checkpointed, ... -> optimizer -> copies handed to it -> sums -> scheduler
"""

from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import UsageError
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.apply import apply_to_model, on_revert, revert
from memfit.strategies.plan import Plan
from memfit.strategies.precision import Precision, device_type
from memfit.train import master_weights
from memfit.train.batch_norm_warning import warn_of_batch_norms
from memfit.train.cuda_graphs import graphs
from memfit.train.gradient_sums import gradient_sums
from memfit.train.job import Job, Loss
from memfit.train.loss_scaler import Scaler
from memfit.train.update import Protect, Update


def job_of(
    job: Job | nn.Module, optimizer: Any, loss: Loss | None, scheduler: Any, max_grad_norm: float | None
) -> Job:
    """Return a job, given or made of its parts.

    Raises:
        UsageError: parts are missing, or given twice.
    """
    if isinstance(job, nn.Module):
        whole = Job(job, optimizer, loss, scheduler, max_grad_norm)
    elif not isinstance(job, Job):
        raise UsageError(f"Engine(job, plan) takes a model or a memfit.Job, and was given {job!r}.")
    elif any(part is not None for part in (optimizer, loss, scheduler, max_grad_norm)):
        raise UsageError(
            "Engine(job, plan): the job has its own optimizer, loss, scheduler and max_grad_norm."
        )
    else:
        whole = job
    norm = whole.max_grad_norm
    if norm is not None and not norm > 0:
        raise UsageError(f"max_grad_norm={norm!r} must be a number above 0, or None for no clipping.")
    if isinstance(whole.model, DistributedDataParallel) or world_size() > 1:
        raise UsageError("memfit.Engine trains on one GPU: several ranks are not supported yet.")
    if next(whole.model.parameters(), None) is None:
        raise UsageError(f"{type(whole.model).__name__} has no parameters: there is nothing to train.")
    if not (isinstance(whole.optimizer, torch.optim.Optimizer) or callable(whole.optimizer)):
        raise UsageError(
            "Engine(model, plan) needs an optimizer beside the model: optimizer=..., one of PyTorch's or "
            "alike, or what makes one from parameters."
        )
    return whole


def set_up(
    job: Job, plan: Plan, max_grad_norm: float | None, *, cuda_graphs: bool, protect: Protect
) -> Update:
    """Apply a plan to a job's model and optimizer; return what updates them.

    Raises:
        UsageError: it does not suit them.
    """
    with ExitStack() as undo:
        undo.callback(revert, job.model)
        update = _set_up(job, plan, max_grad_norm, cuda_graphs=cuda_graphs, protect=protect)
        undo.pop_all()
    return update


def _set_up(
    job: Job, plan: Plan, max_grad_norm: float | None, *, cuda_graphs: bool, protect: Protect
) -> Update:
    model, precision = job.model, plan.precision or Precision("fp32")
    accumulation = plan.accumulation or Accumulation(gradient_accumulation_steps=1)
    full = master_weights.copies(model.parameters()) if precision.master_weights else {}
    apply_to_model(model, plan)
    made = job.optimizer
    optimizer = made if isinstance(made, torch.optim.Optimizer) else made(model.parameters())
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS asks for the loss itself, several times a step, and an engine goes through a batch once. "
            "Train it in a loop of your own; memfit.apply(model, plan) still serves there."
        )
    if plan.optimizer_state is not None:
        plan.optimizer_state.optimizer(optimizer, model)
    master_weights.hand_over(optimizer, full)
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
        warn_of_batch_norms(model, "of a window", stacklevel=6)
    update = Update(
        optimizer,
        job.scheduler(optimizer) if callable(job.scheduler) else job.scheduler,
        Scaler(precision.loss_scale, device_type(model)),
        sums,
        full,
        max_grad_norm=max_grad_norm,
        protect=protect,
        graphs=graphs(optimizer) if cuda_graphs else None,
        in_backward=in_backward,
    )
    for hook in update.hooks():
        on_revert(model, hook.remove)
    if full:
        on_revert(model, partial(_give_back, ref(update)), last=True)
    return update


def _give_back(update: "ref[Update]") -> None:
    """Have a model's parameters be what their float32 copies are, and its optimizer update them again."""
    there = update()
    if there is not None:
        master_weights.write(there.masters)
        master_weights.hand_over(there.optimizer, {copy: one for one, copy in there.masters.items()})


def world_size() -> int:
    """Return how many ranks there are: 1 where nobody made a group of them."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
