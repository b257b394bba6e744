"""When the learning rate changes: after each update, after each epoch, or by a validated metric."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from memfit.errors import UsageError
from memfit.train.job import Interval, Job


@dataclass(frozen=True, slots=True)
class Schedule:
    """A scheduler, and when it steps."""

    scheduler: Any = None
    interval: Interval | None = None
    metric: str | None = None
    """The name of the metric that it watches, after each epoch."""

    def after_update(self, loss: Callable[[], torch.Tensor]) -> None:
        """Step a scheduler that counts updates, or that watches their mean loss."""
        if self.interval != "update":
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss())
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
        """Check that the metric that the scheduler watches is among those that are computed.

        Raises:
            UsageError: it is not.
        """
        if self.metric is not None and self.metric not in names:
            known = f"The metrics are {', '.join(names)}." if names else "Nothing is validated."
            raise UsageError(
                f"The scheduler watches the metric {self.metric!r}, which is not computed. {known} Pass "
                f"engine.fit(..., validate=loader, metrics={{{self.metric!r}: ...}}). In a loop of your own, "
                "call engine.validate before engine.end_epoch."
            )

    def __str__(self) -> str:
        """Say when it steps.

        >>> print(Schedule(None, "epoch"))
        after each epoch
        """
        if self.metric is not None:
            return f"by the metric {self.metric!r}"
        return "never" if self.interval is None else f"after each {self.interval}"


def check_schedule(job: Job) -> None:
    """Check that a job says when its scheduler steps.

    Raises:
        UsageError: it does not, or contradicts itself.
    """
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


def schedule_of(job: Job, optimizer: torch.optim.Optimizer) -> Schedule:
    """Return a job's schedule; its scheduler is made if the job has a function for it.

    Raises:
        UsageError: the scheduler is none, or cannot step as the job says.
    """
    if job.scheduler is None:
        return Schedule()
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
    return Schedule(made, job.scheduler_interval, job.scheduler_metric)
