"""A plan, divided between memfit and a trainer that has its own accumulation, precision and clipping.

checkpointing, offload, optimizer_state,
compilation, batch_slices                memfit applies them to the model or its optimizer
accumulation, precision, max_grad_norm   become settings of the trainer
sharding                                 "ddp", which trainers do by themselves

A trainer divides by K batches, and so a last window of fewer micro-batches counts less, and each micro-batch
counts the same however many tokens it has. Its window has one divisor here, what ``memfit.Engine`` computes:

    backward     loss / (total / weight)        the first micro-batch estimates the total: its weight times K
    ...
    closing      gradients times (total / weights of all micro-batches and ranks): 1 if the estimate was right
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import UsageError
from memfit.planning.plan_file import PlanFile, read_plan
from memfit.strategies.accumulation import Accumulation, Remainder
from memfit.strategies.apply import add_step_to_revert, apply, apply_to_optimizer
from memfit.strategies.plan import Plan
from memfit.strategies.precision import Dtype, LossScale, Precision
from memfit.strategies.read_configuration import Configuration
from memfit.strategies.sharding import world_size
from memfit.train.accumulation_window import AccumulationWindow


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """A plan for a trainer: what memfit applies, and which settings of the trainer carry out the rest."""

    trainer: str
    """Its name, for errors."""
    changes: Plan
    """What memfit applies to the model, and to its optimizer."""
    batches_per_update: int = 1
    """Batches of the loader that make one update; each is a micro-batch."""
    batch_size: int | None = None
    """Samples of each of these batches; None if the plan does not say."""
    dtype: Dtype | None = None
    """Of autocast; None for the trainer's own setting."""
    loss_scale: LossScale | None = None
    """With float16."""
    max_grad_norm: float | None = None
    fused: bool = False
    """Whether the plan needs an optimizer that was created with ``fused=True``."""

    @classmethod
    def of(
        cls, given: Any, trainer: str, batch_size: int | None = None, *, remainder: Remainder = "step"
    ) -> "TrainerPlan":
        """Divide a plan.

        Args:
            given: as for ``memfit.Engine``: a plan, strategies, a dict, or the path of a file.
            trainer: its name, for errors.
            batch_size: samples of the batches that the plan divides; the trainer's loader makes smaller ones.

            remainder: what the trainer does with the last batches of an epoch, see ``Accumulation``.

        Raises:
            UsageError: the trainer cannot do what the plan says, or ``PYTORCH_ALLOC_CONF`` is not what the
                plan's file needs; the message names the setting.

        >>> TrainerPlan.of(Accumulation(batches_per_update=4), "Lightning").batches_per_update
        4
        """
        configuration = Configuration.of(given)
        plan = configuration.plan
        if configuration.arena is not None:
            raise _refusal(trainer, "the settings of the arena", "use memfit.Engine, or leave them out")
        if plan.sharding is not None and plan.sharding.mode != "ddp":
            how = (
                f"choose how {trainer} shards in {trainer}'s own settings, and leave sharding out of the plan"
            )
            raise _refusal(trainer, f"sharding {plan.sharding.mode!r}", how)
        file = _plan_file(given)
        if file is not None:
            _expect_allocator(file.change.allocator)
        divided = None if file is None else file.change.micro_batches
        in_file = None if divided is None else divided.size * divided.count
        accumulation, size = plan.accumulation, batch_size or in_file
        steps = 1
        if accumulation is not None:
            _expect_feasible(accumulation, trainer, remainder)
            steps, size = _loader(accumulation, trainer, size)
        dtype, scale = _autocast(plan.precision, trainer)
        changes = replace(plan, sharding=None, accumulation=None, precision=None)
        fused = file is not None and file.change.fused
        made = cls(trainer, changes, steps, size, dtype, scale, configuration.max_grad_norm, fused)
        if made.max_grad_norm is not None:
            made.refuse_in_backward("max_grad_norm")
        return made

    def expect_float16(self, device: torch.device) -> None:
        """Refuse float16 where Accelerate, or a trainer that uses it, silently trains in float32.

        Raises:
            UsageError: the plan has float16, and the device is a CPU.
        """
        if self.dtype == "fp16" and device.type == "cpu":
            raise UsageError(
                f"{self.trainer} would silently train in float32: it has no fp16 on cpu. Use bf16 in the "
                "plan, or memfit.Engine."
            )

    def apply_to_model(self, model: nn.Module) -> None:
        """Apply the plan to a model, before the trainer wraps it.

        Raises:
            UsageError: a strategy does not suit the model.
        """
        apply(model, replace(self.changes, optimizer_state=None))

    def apply_to_optimizer(self, optimizer: Optimizer, models: Iterable[nn.Module]) -> None:
        """Apply the plan to an optimizer, before its first step; ``memfit.revert`` on a model undoes it.

        Raises:
            UsageError: a setting does not suit the optimizer.
        """
        if self.fused and not all(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                f"The plan needs a fused optimizer. Create {type(optimizer).__name__} with fused=True."
            )
        if self.changes.optimizer_state is None:
            return
        models = list(models)
        applied = apply_to_optimizer(optimizer, models, self.changes.optimizer_state)
        for model in models[:1]:
            add_step_to_revert(model, applied.undo)

    def hold_static(self, scaler: torch.amp.GradScaler) -> None:
        """Have the trainer's scaler keep its scale, if that of the plan is static."""
        if self.loss_scale is not None and self.loss_scale.is_static:
            scaler.update = partial(scaler.update, self.loss_scale.init_scale)  # type: ignore[method-assign]

    def expect_loader(self, loader: Any) -> None:
        """Check that a loader makes batches of the size that the plan has, as far as both say one."""
        size = getattr(loader, "batch_size", None) or getattr(loader, "total_batch_size", None)
        if self.batch_size is not None and size is not None and size != self.batch_size:
            raise UsageError(
                f"The plan makes an update of {self.batches_per_update} batches of {self.batch_size} "
                f"samples, but the loader's batches have {size}. Create the loader with "
                f"batch_size={self.batch_size}."
            )

    def refuse_in_backward(self, setting: str) -> None:
        """Refuse a trainer's setting that needs all gradients at once, if the plan steps in the backward."""
        state = self.changes.optimizer_state
        if state is not None and state.step_in_backward:
            raise UsageError(
                f"step_in_backward and {setting} cannot be combined: parameters are updated before all "
                f"gradients are known. Leave out one of the two."
            )


def _refusal(trainer: str, what: str, instead: str) -> UsageError:
    return UsageError(
        f"{trainer} cannot do this part of the plan: {what}. To train with {trainer}, {instead}."
    )


def _plan_file(given: Any) -> PlanFile | None:
    """Return the file that a plan was given as; None if it was given otherwise."""
    is_file = isinstance(given, str | PathLike) and Path(given).suffix == ".json"
    return read_plan(Path(given)) if is_file else None


def _expect_allocator(needed: str) -> None:
    """Check that PyTorch's allocator has the settings that a plan needs."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    given = {setting for name in names for setting in os.environ.get(name, "").split(",")}
    if needed and not given.issuperset(needed.split(",")):
        raise UsageError(
            f"The plan needs settings of PyTorch's allocator, which it reads when it starts. Set "
            f"PYTORCH_ALLOC_CONF={needed} in front of the command."
        )


def _expect_feasible(accumulation: Accumulation, trainer: str, remainder: Remainder) -> None:
    if accumulation.gradient_dtype is not None:
        what = f"gradient_dtype={accumulation.gradient_dtype!r}"
        raise _refusal(trainer, what, "leave it out, or use memfit.Engine")
    if accumulation.remainder not in (None, remainder):
        what = f"remainder={accumulation.remainder!r}"
        raise _refusal(trainer, what, f"write remainder={remainder!r}, which is what {trainer} does")


def _loader(accumulation: Accumulation, trainer: str, batch_size: int | None) -> tuple[int, int | None]:
    """Return how many batches of the loader make an update, and their size if it is known."""
    if accumulation.gathers:
        return accumulation.steps, accumulation.micro_batch_size
    batch_size = accumulation.global_batch_size or batch_size
    if batch_size is None:
        raise _refusal(
            trainer,
            "it divides batches, and the loader makes them",
            f"create the loader with smaller batches, and write batches_per_update={accumulation.steps} "
            "(Accumulation) instead",
        )
    size = accumulation.micro_batch_size or max(1, batch_size // accumulation.steps)
    steps = accumulation.parts_per_batch or batch_size // size
    if size * steps != batch_size:
        raise UsageError(
            f"The plan divides a batch of {batch_size} samples into parts that are not equal, as {trainer} "
            f"needs them. Choose a batch size that {accumulation.parts_per_batch or size} divides."
        )
    return steps, size


def _autocast(precision: Precision | None, trainer: str) -> tuple[Dtype | None, LossScale | None]:
    if precision is None:
        return None, None
    if not precision.autocast:
        raise _refusal(
            trainer,
            "autocast=False" + ", master_weights=True" * precision.master_weights,
            "use autocast, or memfit.Engine",
        )
    return precision.dtype, precision.loss_scale


@contextmanager
def report_missing_extra(name: str) -> Iterator[None]:
    """Report a missing package of the block's imports as one of an extra.

    Args:
        name: of the extra, and of the package.

    Raises:
        UsageError: the package is not installed.

    >>> with report_missing_extra("lightning"):
    ...     import tomllib
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise UsageError(
            f"memfit.{name} needs a package that is not installed ({error.name}). Install it with pip "
            f"install 'memfit[{name}]'."
        ) from error


class WindowLossDivider:
    """Divides the losses of one window after the other.

    Args:
        batches_per_update: micro-batches that fill a window; the trainer may close it earlier.
    """

    def __init__(self, batches_per_update: int) -> None:
        self._planned = batches_per_update
        self._window: AccumulationWindow | None = None

    @property
    def done(self) -> int:
        """Micro-batches of the open window so far."""
        return 0 if self._window is None else self._window.done

    def drop(self) -> None:
        """Forget the open window: its gradients were cleared."""
        self._window = None

    def divided(
        self, loss: torch.Tensor, weight: float | None = None, *, device: torch.device | None = None
    ) -> torch.Tensor | None:
        """Return what a micro-batch's backward begins with, instead of its mean loss; None for weight 0.

        Args:
            loss: the mean over the micro-batch.
            weight: tokens or samples in that mean; for all micro-batches of a window, or for none.
            device: over which ranks communicate; by default the loss's.

        Raises:
            UsageError: the weight is invalid, or only some micro-batches have one.
        """
        weight = None if weight is None else float(weight)
        if self._window is None:
            self._window = AccumulationWindow(self._planned)
            if weight is not None and world_size() > 1:
                self._window.total = _total(weight, device or loss.device) * self._planned / world_size()
        if not weight and weight is not None and world_size() > 1:
            raise UsageError(
                "A micro-batch has weight 0, but with several ranks each must run a backward. Leave such "
                "batches out of the data."
            )
        if self._window.done and self._window.weighted != (weight is not None):
            raise UsageError(
                "In this window some micro-batches have a weight and others do not. Give one to each, or to "
                "none."
            )
        return self._window.add(loss, weight)

    def close(self, parameters: Iterable[nn.Parameter]) -> None:
        """Correct the gradients of a window, after its last backward and before they are clipped."""
        window, self._window = self._window, None
        if window is None or window.total is None:
            return
        held = [each.grad for each in parameters if each.grad is not None]
        weight = window.weight
        if window.weighted and world_size() > 1 and held:
            weight = _total(weight, held[0].device) / world_size()
        if held and window.total != weight:
            torch._foreach_mul_(held, window.total / weight)


def _total(weight: float, device: torch.device) -> float:
    """Return the sum of a weight over the ranks."""
    total = torch.tensor(weight, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return total.item()
