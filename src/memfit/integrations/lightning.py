"""Lightning, under a plan: a callback that applies it, and corrects the divisor of accumulated gradients."""

from collections.abc import Callable
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.integrations.trainer_plan import TrainerPlan, WindowLossDivider, report_missing_extra
from memfit.strategies.apply import revert

with report_missing_extra("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.plugins import MixedPrecision

_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def arguments(
    plan: Any, *, batch_size: int | None = None, weight: Callable[[Any], float] | None = None
) -> dict[str, Any]:
    """Return the arguments of Lightning's ``Trainer`` that carry out a plan, the callback among them.

    Args:
        plan: as for ``memfit.Engine``: a plan, strategies, a dict, or the file that ``memfit plan`` wrote.
        batch_size: samples of the batches that the plan divides; the loader then makes smaller ones.
        weight: as for ``PlanCallback``.

    Raises:
        UsageError: Lightning cannot do what the plan says.

    >>> arguments({"batches_per_update": 4, "precision": "bf16"})["accumulate_grad_batches"]
    4
    """
    callback = PlanCallback(plan, batch_size=batch_size, weight=weight)
    made = callback.plan
    found: dict[str, Any] = {"accumulate_grad_batches": made.batches_per_update, "callbacks": [callback]}
    if made.max_grad_norm is not None:
        found["gradient_clip_val"] = made.max_grad_norm
    if made.loss_scale is not None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        scaler = torch.amp.GradScaler(device, **made.loss_scale.scaler_arguments())
        made.hold_static(scaler)
        found["plugins"] = [MixedPrecision("16-mixed", device, scaler)]
    elif made.dtype is not None:
        found["precision"] = _PRECISION[made.dtype]
    return found


class PlanCallback(Callback):
    """Carries out a plan in a Lightning ``Trainer``; ``arguments`` makes it, with the trainer's settings.

    Lightning divides each loss by ``accumulate_grad_batches``, also in the last window of an epoch, which may
    have fewer batches. The callback corrects the gradients of that window, before they are clipped.

    Args:
        plan: as for ``arguments``.
        batch_size: as for ``arguments``.
        weight: returns a batch's tokens or samples, if they differ between batches: ``training_step`` returns
            the mean over them. Without it, all batches of a window count the same.
    """

    def __init__(
        self, plan: Any, *, batch_size: int | None = None, weight: Callable[[Any], float] | None = None
    ) -> None:
        self.plan = TrainerPlan.of(plan, "Lightning", batch_size)
        self._weight_of = weight
        self._weight: float | None = None
        self._applied = False
        self._divisor = WindowLossDivider(self.plan.batches_per_update)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Apply the plan to the model, before the strategy wraps it."""
        if stage != "fit":
            return
        steps = self.plan.batches_per_update
        if trainer.accumulate_grad_batches != steps:
            raise UsageError(
                f"The plan makes an update of {steps} batches, but accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches}. Write Trainer(**memfit.lightning.arguments(plan)), or "
                f"accumulate_grad_batches={steps}."
            )
        if not pl_module.automatic_optimization and (steps > 1 or self._weight_of is not None):
            raise UsageError(
                "The module optimizes manually (automatic_optimization=False): its own training_step divides "
                "and steps. Leave accumulation and weight out of the plan."
            )
        if trainer.strategy.handles_gradient_accumulation:
            raise UsageError(
                f"{type(trainer.strategy).__name__} accumulates gradients by itself. Leave memfit's callback "
                "out, or choose another strategy."
            )
        if trainer.gradient_clip_val:
            self.plan.refuse_in_backward("gradient_clip_val")
        self.plan.apply_to_model(pl_module)
        self._applied = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the plan off the model, which may be fitted again; its next optimizers are new ones."""
        if self._applied:
            revert(pl_module)
        self._applied = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Apply the plan to the optimizers, and check the loader."""
        for optimizer in trainer.optimizers:
            self.plan.apply_to_optimizer(optimizer, [pl_module])
        self.plan.expect_loader(trainer.train_dataloader)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a window: Lightning's do not cross epochs, and an earlier fit may have been interrupted."""
        self._divisor.drop()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Weigh the batch."""
        if self._weight_of is not None:
            self._weight = float(self._weight_of(batch))
            if not self._weight:
                raise UsageError(
                    f"Batch {batch_idx} has weight 0. Leave such batches out, or let training_step return "
                    "None."
                )

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Have the backward begin with the gradient that the divisor says, instead of Lightning's 1 / K."""
        if not pl_module.automatic_optimization:
            return
        divided = self._divisor.divided(torch.ones((), dtype=torch.float64), self._weight, device=loss.device)
        factor = 0.0 if divided is None else divided.item() * self.plan.batches_per_update
        if factor != 1.0:
            loss.register_hook(lambda gradient: gradient * factor)  # type: ignore[no-untyped-call]

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Correct the gradients of the window; Lightning clips them afterwards."""
        self._divisor.close(pl_module.parameters())
