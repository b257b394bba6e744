"""MMEngine, under a plan: an optimizer wrapper that owns the divisor, and a hook that weighs batches.

A configuration file says::

    custom_imports = dict(imports=["memfit.integrations.mmengine"])
    optim_wrapper = dict(
        type="PlanOptimWrapper",
        optimizer=dict(type="AdamW", lr=1e-4),
        plan=dict(fp16=dict(loss_scale=512.0), cumulative_iters=4, with_cp=True),
    )
    custom_hooks = [dict(type="BatchWeightHook", weight=count_tokens)]  # only if batches differ
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from memfit.errors import UsageError
from memfit.integrations.trainer_plan import TrainerPlan, WindowLossDivider, report_missing_extra
from memfit.recording.optimizer_accessors import parameters_of
from memfit.strategies.precision import DTYPES, LossScale, device_type_of_model

with report_missing_extra("mmengine"):
    from mmengine.hooks import Hook
    from mmengine.optim import OptimWrapper
    from mmengine.registry import HOOKS, OPTIM_WRAPPERS


@OPTIM_WRAPPERS.register_module()
class PlanOptimWrapper(OptimWrapper):
    """MMEngine's ``OptimWrapper`` and ``AmpOptimWrapper`` in one, which carry out a plan.

    The runner's first call applies the plan to the model and the optimizer; in an ``OptimWrapperDict``, the
    first ``optim_context`` does, to the model that it is given. Windows go on from one epoch to the next; the
    last one of a training run may have fewer batches, as may one inside which a run resumed.

    Args:
        optimizer: the model's.
        plan: as for ``memfit.Engine``: a plan, strategies, a dict (also of MMCV's one-line settings), or the
            file that ``memfit plan`` wrote.
        batch_size: samples of the batches that the plan divides; the loader then makes smaller ones.
        clip_grad: MMEngine's; ``max_grad_norm`` of the plan by default.

    Raises:
        UsageError: MMEngine cannot do what the plan says, or it is said twice.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        plan: Any = None,
        batch_size: int | None = None,
        clip_grad: dict[str, Any] | None = None,
        accumulative_counts: int = 1,
    ) -> None:
        self.plan = TrainerPlan.of(plan, "MMEngine", batch_size, remainder="carry")
        if accumulative_counts != 1:
            raise UsageError("accumulative_counts is the plan's: set batches_per_update in the plan instead.")
        if self.plan.max_grad_norm is not None:
            if clip_grad is not None:
                raise UsageError("clip_grad and the plan's max_grad_norm both clip gradients: leave one out.")
            clip_grad = {"max_norm": self.plan.max_grad_norm}
        if clip_grad is not None:
            self.plan.refuse_in_backward("clip_grad")
        super().__init__(optimizer, self.plan.batches_per_update, clip_grad)
        self._applied = False
        self.weight: float | None = None
        """Of the next batch; None if all count the same."""
        self._divisor = WindowLossDivider(self.plan.batches_per_update)
        self._device = next(parameters_of(optimizer)).device.type
        scale = self.plan.loss_scale
        self.loss_scaler = torch.amp.GradScaler(
            self._device, **(scale or LossScale()).scaler_arguments(), enabled=scale is not None
        )
        self.plan.hold_static(self.loss_scaler)

    def initialize_count_status(self, model: nn.Module, init_counts: int, max_counts: int) -> None:
        """Apply the plan; MMEngine's runner calls this before the first batch."""
        super().initialize_count_status(model, init_counts, max_counts)
        self._apply(model)

    def _apply(self, model: nn.Module) -> None:
        """Apply the plan to the model and the optimizer, once: a runner may train again."""
        if self._applied:
            return
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        self.plan.apply_to_model(inner)
        self.plan.apply_to_optimizer(self.optimizer, [inner])
        self._applied = True

    def update_params(
        self,
        loss: torch.Tensor,
        step_kwargs: dict[str, Any] | None = None,
        zero_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Run backward from a batch's mean loss, and update if that fills the window.

        Raises:
            UsageError: the plan was not applied, because the forward ran outside ``optim_context``.
        """
        if not self._applied:
            raise UsageError(
                "The plan is not applied to a model yet. Run the forward inside `with "
                "optim_wrapper.optim_context(model):`, as MMEngine's train_step does."
            )
        root = self._divisor.divided(loss, self.weight)
        if root is None:
            self._inner_count += 1
        else:
            self.backward(root)
        if self.should_update():
            self.step(**(step_kwargs or {}))
            self.zero_grad(**(zero_kwargs or {}))

    def backward(self, loss: torch.Tensor, **arguments: Any) -> None:
        """Run backward from a loss, scaled if the plan says so."""
        super().backward(self.loss_scaler.scale(loss), **arguments)

    def step(self, **arguments: Any) -> None:
        """Correct and clip the gradients, and step."""
        self._divisor.close(parameters_of(self.optimizer))
        if self.clip_grad_kwargs:
            self.loss_scaler.unscale_(self.optimizer)
            self._clip_grad()
        self.loss_scaler.step(self.optimizer, **arguments)
        self.loss_scaler.update()

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Run a forward under autocast, without synchronization in all batches of a window but the last."""
        self._apply(model)
        dtype = None if self.plan.dtype in (None, "fp32") else getattr(torch, DTYPES[self.plan.dtype])
        with (
            super().optim_context(model),
            torch.autocast(device_type_of_model(model), dtype, enabled=dtype is not None),
        ):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the states of optimizer and loss scale."""
        state: dict[str, Any] = super().state_dict()
        return state | (
            {"loss_scaler": self.loss_scaler.state_dict()} if self.loss_scaler.is_enabled() else {}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the states; a static loss scale stays as set."""
        scale = state_dict.pop("loss_scaler", None)
        if scale and self.loss_scaler.is_enabled() and not (self.plan.loss_scale or LossScale()).is_static:
            self.loss_scaler.load_state_dict(scale)
        super().load_state_dict(state_dict)


@HOOKS.register_module()
class BatchWeightHook(Hook):
    """Weighs batches that have different numbers of tokens or samples, for ``PlanOptimWrapper``.

    Args:
        weight: returns a batch's tokens or samples, over which the model's loss is the mean.
    """

    def __init__(self, weight: Callable[[Any], float]) -> None:
        self._weight_of = weight

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Weigh a batch.

        Raises:
            UsageError: the runner's optimizer wrapper is another.
        """
        if not isinstance(runner.optim_wrapper, PlanOptimWrapper):
            raise UsageError('BatchWeightHook needs optim_wrapper=dict(type="PlanOptimWrapper", ...).')
        runner.optim_wrapper.weight = float(self._weight_of(data_batch))
