"""Set up an engine: check its job, and apply its plan in the order that the strategies need.

float32 copies -> model cast, checkpointed, ... -> optimizer, given the copies -> sums -> scheduler
"""

from contextlib import ExitStack
from functools import partial
from typing import Any, get_args
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from memfit.errors import UsageError
from memfit.strategies import apply
from memfit.strategies.accumulation import Accumulation
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.plan import Plan
from memfit.strategies.precision import Precision, device_type
from memfit.train import master_weights
from memfit.train.batch_norm_warning import warn_of_batch_norms
from memfit.train.cuda_graphs import make_step_graphs
from memfit.train.gradient_sums import gradient_sums
from memfit.train.job import Interval, Job, Loss
from memfit.train.loss_scaler import LossScaler
from memfit.train.optimizer_update import OptimizerUpdate, Protect


def job_of(
    job: Job | nn.Module,
    optimizer: Any,
    loss: Loss | None,
    scheduler: Any,
    scheduler_interval: Interval | None,
    max_grad_norm: float | None,
) -> Job:
    """Return the job, as given or made of its parts.

    Raises:
        UsageError: parts are missing, or given twice.
    """
    if isinstance(job, nn.Module):
        whole = Job(job, optimizer, loss, scheduler, scheduler_interval, max_grad_norm)
    elif not isinstance(job, Job):
        raise UsageError(f"Engine(job, plan) takes a model or a memfit.Job, not {job!r}.")
    elif any(each is not None for each in (optimizer, loss, scheduler, scheduler_interval, max_grad_norm)):
        raise UsageError(
            "Engine(job, plan): set optimizer, loss, scheduler, scheduler_interval and max_grad_norm in the "
            "memfit.Job, not in the call to memfit.Engine."
        )
    else:
        whole = job
    norm = whole.max_grad_norm
    if norm is not None and not norm > 0:
        raise UsageError(f"max_grad_norm must be None or a number above 0, not {norm!r}.")
    _check_interval(whole)
    if isinstance(whole.model, DistributedDataParallel) or world_size() > 1:
        raise UsageError(
            "memfit.Engine trains on one GPU: DistributedDataParallel and several ranks are not supported "
            "yet."
        )
    if next(whole.model.parameters(), None) is None:
        raise UsageError(f"{type(whole.model).__name__} has no parameters to train.")
    if not (isinstance(whole.optimizer, torch.optim.Optimizer) or callable(whole.optimizer)):
        raise UsageError(
            "Engine(model, plan) also needs optimizer=...: pass a PyTorch optimizer, or a "
            "function that creates one from parameters."
        )
    return whole


def _check_interval(job: Job) -> None:
    """Check that a scheduler has an interval, and suits it."""
    given, known = job.scheduler_interval, get_args(Interval)
    if given is not None and given not in known:
        raise UsageError(f"scheduler_interval must be one of {', '.join(known)}, not {given!r}.")
    if (job.scheduler is None) != (given is None):
        raise UsageError(
            "A scheduler needs an interval, and an interval a scheduler. Pass scheduler_interval='update' if "
            "the scheduler counts updates of the parameters, or scheduler_interval='epoch' if it counts "
            "epochs, as StepLR(optimizer, 30) usually does."
        )


def _scheduler(job: Job, optimizer: torch.optim.Optimizer) -> Any:
    """Return the job's scheduler, made if the job has a function for it."""
    made = job.scheduler(optimizer) if callable(job.scheduler) else job.scheduler
    if job.scheduler_interval == "epoch" and isinstance(made, ReduceLROnPlateau):
        raise UsageError(
            "ReduceLROnPlateau needs a metric after each epoch: call its step(metric) in a callback's "
            "on_epoch_end, and do not pass it to the engine. With scheduler_interval='update' it watches the "
            "loss of each update."
        )
    return made


def set_up(
    job: Job, plan: Plan, max_grad_norm: float | None, *, cuda_graphs: bool, protect: Protect
) -> OptimizerUpdate:
    """Apply a plan to a job's model and optimizer; return their update.

    Raises:
        UsageError: the plan does not suit them.
    """
    with ExitStack() as undo:
        undo.callback(apply.revert, job.model)
        update = _set_up(job, plan, max_grad_norm, cuda_graphs=cuda_graphs, protect=protect)
        undo.pop_all()
    return update


def _set_up(
    job: Job, plan: Plan, max_grad_norm: float | None, *, cuda_graphs: bool, protect: Protect
) -> OptimizerUpdate:
    model, precision = job.model, plan.precision or Precision("fp32")
    accumulation = plan.accumulation or Accumulation()
    masters = master_weights.float32_copies(model.parameters()) if precision.master_weights else {}
    apply.apply_to_model(model, plan)
    given = job.optimizer
    optimizer = given if isinstance(given, torch.optim.Optimizer) else given(model.parameters())
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS evaluates the loss several times per step, but memfit.Engine processes each "
            "batch only once. Use your own training loop; memfit.apply(model, plan) works there."
        )
    if plan.optimizer_state is not None:
        plan.optimizer_state.optimizer(optimizer, model)
    master_weights.replace_parameters(optimizer, masters)
    state = plan.optimizer_state or OptimizerState()
    sums = gradient_sums(model, accumulation, masters)
    if cuda_graphs:
        for in_use, what in (
            (
                precision.loss_scale,
                "fp16: the CPU must read from the GPU whether to apply each step. Choose bf16",
            ),
            (
                sums,
                "gradients summed in another dtype (for master_weights, gradient_dtype or low precision)",
            ),
            (state.step_in_backward, "step_in_backward"),
            (state.offload, "optimizer_state.offload: captured kernels read the state at a fixed address"),
        ):
            if in_use:
                raise UsageError(f"cuda_graphs cannot be combined with {what}.")
    if accumulation.several:
        warn_of_batch_norms(model, "each micro-batch of a window")
    update = OptimizerUpdate(
        optimizer,
        _scheduler(job, optimizer),
        job.scheduler_interval,
        LossScaler(precision.loss_scale, device_type(model)),
        sums,
        masters,
        model,
        max_grad_norm=max_grad_norm,
        protect=protect,
        graphs=make_step_graphs(optimizer) if cuda_graphs else None,
        in_backward=state.step_in_backward,
        offload=state.offload,
    )
    for hook in update.hooks():
        apply.on_revert(model, hook.remove)
    if update.offloaded is not None:
        update.offloaded.send_all()
        apply.on_revert(model, partial(_fetch_state, ref(update)))
    if masters:
        apply.on_revert(model, partial(_restore_float32_parameters, ref(update)), last=True)
    return update


def _restore_float32_parameters(reference: "ref[OptimizerUpdate]") -> None:
    """Write the float32 copies to the model's parameters, and have the optimizer update those again."""
    update = reference()
    if update is not None:
        master_weights.write_to_parameters(update.masters)
        originals = {master: parameter for parameter, master in update.masters.items()}
        master_weights.replace_parameters(update.optimizer, originals)


def _fetch_state(reference: "ref[OptimizerUpdate]") -> None:
    """Move an optimizer's state back to the device, where its own ``step`` needs it."""
    update = reference()
    if update is not None and update.offloaded is not None:
        update.offloaded.fetch_all()


def world_size() -> int:
    """Return the number of ranks: 1 without a process group."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
