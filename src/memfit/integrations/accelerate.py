"""HuggingFace Accelerate, under a plan: an ``Accelerator`` whose ``backward`` owns the divisor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from memfit.errors import UsageError
from memfit.integrations.trainer_plan import TrainerPlan, WindowLossDivider, report_missing_extra

with report_missing_extra("accelerate"):
    from accelerate import Accelerator as _Accelerator
    from accelerate.utils import DistributedType, GradScalerKwargs

_UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class Accelerator(_Accelerator):
    """Accelerate's ``Accelerator``, which carries out a plan.

    The loop stays as Accelerate's documentation writes it. ``prepare`` applies the plan to models and
    optimizers; ``accumulate`` gathers as many batches as the plan says. Gradients are those of the mean over
    the window: also if the last window of an epoch has fewer batches, which Accelerate divides by the full
    number, and if batches have different weights.

    Args:
        plan: as for ``memfit.Engine``: a plan, strategies, a dict, or the file that ``memfit plan`` wrote.
        batch_size: samples of the batches that the plan divides; the loader then makes smaller ones.
        arguments: Accelerate's own.

    Raises:
        UsageError: Accelerate cannot do what the plan says, or ``arguments`` contradict the plan.

    >>> Accelerator({"batches_per_update": 4}, cpu=True).gradient_accumulation_steps
    4
    """

    def __init__(self, plan: Any, *, batch_size: int | None = None, **arguments: Any) -> None:
        self.plan = TrainerPlan.of(plan, "Accelerate", batch_size)
        self._divisor = WindowLossDivider(self.plan.batches_per_update)
        self._in_accumulate = self._went_backward = False
        for name in ("gradient_accumulation_steps", "gradient_accumulation_plugin"):
            if name in arguments:
                raise UsageError(f"{name} is the plan's: set batches_per_update in the plan instead.")
        arguments["gradient_accumulation_steps"] = self.plan.batches_per_update
        if self.plan.dtype is not None:
            if "mixed_precision" in arguments:
                raise UsageError(
                    "mixed_precision is the plan's: leave it out, or leave precision out of the plan."
                )
            arguments["mixed_precision"] = "no" if self.plan.dtype == "fp32" else self.plan.dtype
        if self.plan.loss_scale is not None:
            scaling = GradScalerKwargs(**self.plan.loss_scale.scaler_arguments())
            arguments["kwargs_handlers"] = [*(arguments.get("kwargs_handlers") or ()), scaling]
        super().__init__(**arguments)
        if self.distributed_type in _UNSUPPORTED:
            raise UsageError(
                f"memfit.accelerate.Accelerator does not support {self.distributed_type.value}, which "
                "divides and steps by itself. Use accelerate's Accelerator, or DDP or FSDP."
            )
        self.plan.expect_float16(self.device)
        if self.scaler is not None:
            self.plan.hold_static(self.scaler)

    def prepare(self, *objects: Any, **arguments: Any) -> Any:
        """Prepare objects as Accelerate does, after the plan is applied to the models and optimizers.

        Raises:
            UsageError: the plan does not suit a model, an optimizer or a loader.
        """
        models = [each for each in objects if isinstance(each, torch.nn.Module)]
        for model in models:
            self.plan.apply_to_model(model)
        for each in objects:
            if isinstance(each, torch.optim.Optimizer):
                self.plan.apply_to_optimizer(each, models)
            if isinstance(each, torch.utils.data.DataLoader):
                self.plan.expect_loader(each)
        return super().prepare(*objects, **arguments)

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """Run one micro-batch; see Accelerate.

        Raises:
            UsageError: the last micro-batch of a window ran no backward.
        """
        self._in_accumulate, self._went_backward = True, False
        try:
            with super().accumulate(*models):
                yield
        finally:
            self._in_accumulate = False
        if self.sync_gradients and self._divisor.done:
            raise UsageError(
                "The last micro-batch of a window ran no accelerator.backward, and so the window was divided "
                "by too many. To leave one out, call backward(loss, weight=0), and give the others weights."
            )

    def backward(self, loss: torch.Tensor, weight: float | None = None, **arguments: Any) -> None:
        """Run backward from a micro-batch's mean loss.

        Args:
            loss: the mean over the micro-batch.
            weight: tokens or samples in that mean, if micro-batches differ; for all of a window, or for none.
            arguments: of ``Tensor.backward``.

        Raises:
            UsageError: a micro-batch of several runs a second backward, or one outside ``accumulate``.
        """
        if self.plan.batches_per_update > 1 and not self._in_accumulate:
            raise UsageError(
                f"The plan gathers {self.plan.batches_per_update} batches. Write the loop's body inside "
                "`with accelerator.accumulate(model):`."
            )
        if self.plan.batches_per_update > 1 and self._went_backward:
            raise UsageError(
                "accelerator.backward was called twice for one micro-batch. Add the losses, and call it "
                "once; with two optimizers, leave accumulation out of the plan."
            )
        self._went_backward = True
        root = self._divisor.divided(loss, weight)
        if root is not None:
            (root if self.scaler is None else self.scaler.scale(root)).backward(**arguments)
        if self.sync_gradients:
            self._divisor.close(each for model in self._models for each in model.parameters())

    def clip_grad_norm_(self, parameters: Any, max_norm: float | None = None, norm_type: float = 2.0) -> Any:
        """Clip gradients as Accelerate does.

        Args:
            parameters: as for ``torch.nn.utils.clip_grad_norm_``.
            max_norm: by default that of the plan.
            norm_type: as for ``torch.nn.utils.clip_grad_norm_``.

        Raises:
            UsageError: neither the plan nor the call has a norm, or the plan steps in the backward.
        """
        self.plan.refuse_in_backward("clip_grad_norm_")
        wanted = self.plan.max_grad_norm if max_norm is None else max_norm
        if wanted is None:
            raise UsageError("Neither the plan nor this call of clip_grad_norm_ has a max_norm. Pass one.")
        return super().clip_grad_norm_(parameters, wanted, norm_type)
