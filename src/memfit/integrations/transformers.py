"""HuggingFace's ``Trainer``, under a plan: arguments, a callback, and whether training will fit.

``Trainer`` owns divisor, synchronization and step: it divides by the batches that a window really has, and by
tokens if the model or ``compute_loss_func`` takes ``num_items_in_batch``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memfit.api.dry_run_record_estimate import estimate as _estimate
from memfit.devices import DEFAULT
from memfit.errors import UsageError
from memfit.estimating.serialise_training_step import OptimizerCopy
from memfit.integrations.trainer_plan import TrainerPlan, report_missing_extra
from memfit.random_state import get_random_state, set_random_state
from memfit.strategies.apply import apply_to_optimizer
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.precision import LossScale

with report_missing_extra("transformers"):
    from accelerate import Accelerator
    from transformers import Trainer, TrainerCallback, TrainingArguments

if TYPE_CHECKING:
    from memfit.report.estimate_result import Estimate


def arguments(plan: Any, *, batch_size: int | None = None) -> dict[str, Any]:
    """Return the ``TrainingArguments`` that carry out a plan's accumulation, precision and clipping.

    Args:
        plan: as for ``memfit.Engine``: a plan, strategies, a dict, or the file that ``memfit plan`` wrote.
        batch_size: samples per device of the batches that the plan divides.

    Raises:
        UsageError: ``Trainer`` cannot do what the plan says.

    >>> arguments({"parts_per_batch": 4}, batch_size=32)
    {'gradient_accumulation_steps': 4, 'per_device_train_batch_size': 8}
    """
    made = _trainer_plan(plan, batch_size)
    found: dict[str, Any] = {"gradient_accumulation_steps": made.batches_per_update}
    if made.batch_size is not None:
        found["per_device_train_batch_size"] = made.batch_size
    if made.dtype is not None:
        found |= {"bf16": made.dtype == "bf16", "fp16": made.dtype == "fp16"}
    if made.max_grad_norm is not None:
        found["max_grad_norm"] = made.max_grad_norm
    if made.changes.optimizer_state is not None and made.changes.optimizer_state.step_in_backward:
        found["max_grad_norm"] = 0.0
    return found


class PlanTrainerCallback(TrainerCallback):
    """Applies a plan to the model and the optimizer of a ``Trainer``, and checks the trainer's arguments.

    Args:
        plan: as for ``arguments``.
        batch_size: as for ``arguments``.

    Raises:
        UsageError: ``Trainer`` cannot do what the plan says; or, when the trainer is created, its arguments
            are not those of the plan, or the plan does not suit the model.
    """

    def __init__(self, plan: Any, *, batch_size: int | None = None) -> None:
        self.plan = _trainer_plan(plan, batch_size)
        self._arguments = arguments(plan, batch_size=batch_size)

    def on_init_end(self, args: TrainingArguments, state: Any, control: Any, **trainer: Any) -> None:
        """Check the arguments, and apply the plan to the model, before it is wrapped."""
        for name, value in self._arguments.items():
            if getattr(args, name) != value:
                raise UsageError(
                    f"The plan needs {name}={value!r}, but the trainer has {name}={getattr(args, name)!r}. "
                    "Write TrainingArguments(..., **memfit.transformers.arguments(plan))."
                )
        self.plan.expect_float16(args.device)
        if args.gradient_checkpointing and self.plan.changes.checkpointing is not None:
            raise UsageError(
                "Both the plan and the trainer's gradient_checkpointing recompute activations. Leave out one."
            )
        self.plan.apply_to_model(trainer["model"])

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **trainer: Any) -> None:
        """Apply the plan to the optimizer, which the trainer has just created."""
        optimizer = trainer["optimizer"]
        self.plan.apply_to_optimizer(getattr(optimizer, "optimizer", optimizer), [trainer["model"]])


def fits(trainer: Trainer, gpu: str = "", *, memory: int | None = None) -> bool:
    """Return whether a trainer's training will fit a GPU; to be asked before ``trainer.train()``.

    Args:
        trainer: ready to train; it is not changed.
        gpu: name of a device in the table (``memfit gpus``).
        memory: bytes of device memory instead of that device's.

    Raises:
        UsageError: as for ``estimate``.
    """
    return bool(estimate(trainer, gpu, memory=memory).fits())


def estimate(trainer: Trainer, gpu: str = "", *, memory: int | None = None) -> "Estimate":
    """Return the GPU memory that a trainer's training would use, as ``memfit.estimate`` does for a model.

    The first batches of its loader, its optimizer (as the plan of its ``PlanTrainerCallback`` changes it),
    accumulation and autocast are run on the ghost. The trainer's own calls (evaluation, saving, its
    callbacks) are not: for these, dry-run the script.

    Args:
        trainer: as for ``fits``.
        gpu: as for ``fits``.
        memory: as for ``fits``.

    Raises:
        UsageError: the trainer computes its loss by code of its own, or is one of several ranks.
        MemfitError: as for ``memfit.estimate``.
    """
    args = trainer.args
    changed = type(trainer).compute_loss is not Trainer.compute_loss
    if changed or trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        raise UsageError(
            "This trainer computes its loss by code of its own. Run memfit dry-run SCRIPT.py instead."
        )
    if args.world_size > 1:
        raise UsageError(
            f"This trainer is one of {args.world_size} ranks. Write memfit dry-run --nproc {args.world_size} "
            "SCRIPT.py."
        )
    before, was_training = trainer.optimizer, trainer.model.training
    state = get_random_state()
    try:
        window = trainer.get_batch_samples(
            iter(trainer.get_train_dataloader()), args.gradient_accumulation_steps, torch.device("cpu")
        )
        trainer.model.train()
        return _estimate(
            trainer.model,
            window,
            loss=_WindowLoss(trainer.accelerator.mixed_precision, trainer.model_accepts_loss_kwargs),
            optimizer=_planned(trainer),
            memory=memory,
            gpu=gpu or DEFAULT,
        )
    finally:
        trainer.optimizer = before
        trainer.model.train(was_training)
        set_random_state(state)


@dataclass(slots=True)
class _WindowLoss:
    """Runs a window's micro-batches as ``Trainer`` does; the caller runs the last one's backward."""

    mixed_precision: str
    """Accelerate's setting: it wraps the model's forward."""
    takes_items: bool
    """Whether the model divides its loss by the tokens of the window."""
    prepared: Any = None

    def __call__(self, model: torch.nn.Module, window: tuple[list[Mapping[str, Any]], Any]) -> torch.Tensor:
        """Return the last micro-batch's loss."""
        if self.prepared is None:
            self.prepared = Accelerator(mixed_precision=self.mixed_precision).prepare_model(model)
        batches, items = window
        counted = self.takes_items and items is not None
        given = {"num_items_in_batch": items} if counted else {}
        for batch in batches:
            loss: torch.Tensor = self.prepared(**batch, **given)["loss"]
            loss = loss if counted else loss / len(batches)
            if batch is not batches[-1]:
                loss.backward()  # type: ignore[no-untyped-call]
        return loss


@dataclass(frozen=True, slots=True)
class _PlannedOptimizer:
    """Creates, on the ghost, a trainer's optimizer as a plan changes it when training begins."""

    unchanged: OptimizerCopy
    model: torch.nn.Module
    state: OptimizerState

    def __call__(self, parameters: Any) -> torch.optim.Optimizer:
        """Return the optimizer of the model's parameters."""
        optimizer = self.unchanged.make()
        apply_to_optimizer(optimizer, [self.model], self.state)
        return optimizer


def _planned(trainer: Trainer) -> "torch.optim.Optimizer | _PlannedOptimizer":
    """Return a trainer's optimizer; if a callback has a plan for it, what creates the planned one."""
    optimizer: torch.optim.Optimizer = trainer.create_optimizer()
    for callback in trainer.callback_handler.callbacks:
        state = callback.plan.changes.optimizer_state if isinstance(callback, PlanTrainerCallback) else None
        if state is not None:
            return _PlannedOptimizer(OptimizerCopy.of(optimizer), trainer.model, state)
    return optimizer


def _trainer_plan(plan: Any, batch_size: int | None) -> TrainerPlan:
    made = TrainerPlan.of(plan, "Trainer", batch_size)
    if made.loss_scale not in (None, LossScale()):
        raise UsageError(
            "Trainer has no setting for the loss scale: leave loss_scale out of the plan, or use "
            "memfit.accelerate.Accelerator in a loop of your own, or memfit.Engine."
        )
    return made
