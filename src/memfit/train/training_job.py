"""The job of an engine: a model, its optimizer and its loss, and when its learning rate changes."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from memfit.errors import UsageError

Interval = Literal["update", "epoch"]
Loss = Callable[[nn.Module, Any], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """What an engine trains, so that one function of a user's can return all of it.

    >>> job = Job(nn.Linear(4, 1), torch.optim.AdamW, lambda model, batch: model(batch).square().mean())
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer | Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    """A PyTorch optimizer, or a function that creates one from parameters."""
    loss: Loss | None = None
    """``loss(model, batch)`` returns the mean over a batch, or a pair: the sum, and its divisor in tokens or
    samples."""
    scheduler: Any = None
    """A PyTorch learning-rate scheduler, or a function that creates one from the optimizer."""
    scheduler_interval: Interval | None = None
    """When the scheduler steps: after each ``"update"`` of the parameters, or after each ``"epoch"``. Each
    scheduler needs one of the two, or a metric: ``StepLR(optimizer, 30)`` means 30 of these."""
    scheduler_metric: str | None = None
    """The name of the validated metric that ``ReduceLROnPlateau`` watches, after each epoch."""
    max_grad_norm: float | None = None
    """The norm to which a window's gradients are clipped, once: those of the optimizer's parameters."""
    batch: Callable[[int], Any] | None = None
    """``batch(size)`` returns a batch of so many samples, on any device, for the commands that run a job:
    ``memfit plan job.py:make_job``. Random values do. An engine does not call it."""


def as_job(job: Job | nn.Module, *parts: Any) -> Job:
    """Return the job, as given or made of its parts: the other fields of ``Job``, in their order."""
    if isinstance(job, nn.Module):
        whole = Job(job, *parts)
    elif not isinstance(job, Job):
        raise UsageError(f"Engine(job, plan) takes a model or a memfit.Job, not {job!r}.")
    elif any(part is not None for part in parts):
        raise UsageError(
            f"Engine(job, plan): set {', '.join(field.name for field in fields(Job)[1 : 1 + len(parts)])} in "
            "the memfit.Job, not in the call to memfit.Engine."
        )
    else:
        whole = job
    norm = whole.max_grad_norm
    if norm is not None and not norm > 0:
        raise UsageError(f"max_grad_norm must be None or a number above 0, not {norm!r}.")
    _check_schedule(whole)
    if next(whole.model.parameters(), None) is None:
        raise UsageError(f"{type(whole.model).__name__} has no parameters to train.")
    if isinstance(whole.optimizer, list | tuple | Mapping) and len(whole.optimizer) > 1:
        raise UsageError(
            f"An engine has one optimizer, but {len(whole.optimizer)} were given. To train with several, as "
            "for a GAN, create an engine for each, with its own model, loss and scheduler, and call their "
            "step methods in turn (docs/training.md, Several optimizers)."
        )
    if not (isinstance(whole.optimizer, torch.optim.Optimizer) or callable(whole.optimizer)):
        raise UsageError(
            "Engine(model, plan) also needs optimizer=...: pass a PyTorch optimizer, or a "
            "function that creates one from parameters."
        )
    return whole


@dataclass(frozen=True, slots=True)
class SchedulerAndInterval:
    """A scheduler, and when it steps."""

    scheduler: Any = None
    interval: Interval | None = None
    metric: str | None = None
    """The name of the metric that it watches, after each epoch."""

    def after_update(self, loss: torch.Tensor) -> None:
        """Step a scheduler that counts updates, or that watches their mean loss."""
        if self.interval != "update":
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)
        else:
            self.scheduler.step()

    def after_epoch(self) -> None:
        """Step a scheduler that counts epochs."""
        if self.interval == "epoch" and self.metric is None:
            self.scheduler.step()

    def after_validation(self, metrics: Mapping[str, float]) -> None:
        """Step a scheduler that watches one of these metrics.

        Raises:
            UsageError: the metric is not among them.
        """
        if self.metric is not None:
            self.expect_metric(metrics)
            self.scheduler.step(metrics[self.metric])

    def expect_metric(self, names: Collection[str]) -> None:
        """Check that the metric that the scheduler watches is among those that are computed."""
        if self.metric is not None and self.metric not in names:
            known = f"The metrics are {', '.join(names)}." if names else "Nothing is validated."
            raise UsageError(
                f"The scheduler watches the metric {self.metric!r}, which is not computed. {known} Pass "
                f"engine.fit(..., validate=loader, metrics={{{self.metric!r}: ...}}). In a loop of your own, "
                "call engine.validate before engine.end_epoch."
            )

    def __str__(self) -> str:
        """Say when it steps.

        >>> print(SchedulerAndInterval(None, "epoch"))
        after each epoch
        """
        if self.metric is not None:
            return f"by the metric {self.metric!r}"
        return "never" if self.interval is None else f"after each {self.interval}"


def _check_schedule(job: Job) -> None:
    """Check that a job says when its scheduler steps."""
    interval, metric, known = job.scheduler_interval, job.scheduler_metric, get_args(Interval)
    if interval is not None and interval not in known:
        raise UsageError(f"scheduler_interval must be one of {', '.join(known)}, not {interval!r}.")
    if interval == "update" and metric is not None:
        raise UsageError(
            f"scheduler_interval='update' contradicts scheduler_metric={metric!r}, which is known only after "
            "each epoch. Leave out one of the two."
        )
    if (job.scheduler is None) != (interval is None and metric is None):
        raise UsageError(
            "A scheduler needs an interval, and an interval a scheduler. Pass scheduler_interval='update' if "
            "the scheduler counts updates of the parameters, scheduler_interval='epoch' if it counts epochs, "
            "as StepLR(optimizer, 30) usually does, or scheduler_metric='loss' if it watches that metric."
        )


def learning_rate_schedule_of(job: Job, optimizer: torch.optim.Optimizer) -> SchedulerAndInterval:
    """Return a job's schedule; its scheduler is made if the job has a function for it."""
    if job.scheduler is None:
        return SchedulerAndInterval()
    made = job.scheduler(optimizer) if callable(job.scheduler) else job.scheduler
    if not (hasattr(made, "step") and hasattr(made, "state_dict")):
        raise UsageError(
            f"scheduler={made!r} is not a scheduler: it has no step or no state_dict. To combine several, "
            "use SequentialLR or ChainedScheduler of torch.optim.lr_scheduler."
        )
    watches = isinstance(made, ReduceLROnPlateau)
    if watches and job.scheduler_interval == "epoch" and job.scheduler_metric is None:
        raise UsageError(
            "ReduceLROnPlateau needs a metric after each epoch. Pass scheduler_metric='loss', or the name of "
            "another metric that engine.fit(validate=..., metrics=...) computes. With "
            "scheduler_interval='update' it watches the loss of each update."
        )
    if job.scheduler_metric is not None and isinstance(made, LRScheduler) and not watches:
        raise UsageError(
            f"{type(made).__name__} watches no metric: of PyTorch's schedulers, only ReduceLROnPlateau does. "
            "Pass scheduler_interval='update' or 'epoch' in place of scheduler_metric."
        )
    return SchedulerAndInterval(made, job.scheduler_interval, job.scheduler_metric)
