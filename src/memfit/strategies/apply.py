"""Apply a plan to a model and its optimizer in place, and revert it: in any loop, memfit's or another's.

    apply_to_model        the strategies that change the model: precision, checkpointing, slices and others
    apply_to_optimizer    bits, implementation    the optimizer becomes another, in place
                          offload                 its step becomes that of ``OffloadedOptimizerState``
                          step_in_backward        hooks on its parameters; ``step`` finds nothing left to do

``memfit.apply``, ``Engine``, trainers and ``inject_plan`` call both, each when its loop has what they need.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memfit.errors import UsageError
from memfit.recording.module_names import called_module
from memfit.strategies.mechanisms.master_weights import (
    function_to_round_into_parameters,
    replace_optimizer_parameters,
)
from memfit.strategies.mechanisms.offloaded_optimizer_state import BLOCK_BYTES, OffloadedOptimizerState
from memfit.strategies.mechanisms.optimizer_step import check_step_is_not_replaced, replace_optimizer_step
from memfit.strategies.mechanisms.step_in_backward import (
    GradientGuard,
    StepInBackward,
    raise_loop_unsuitable_error,
)
from memfit.strategies.mechanisms.wrap_forward import forward_wrappers, remove_wrappers
from memfit.strategies.optimizer_state import OptimizerState
from memfit.strategies.plan import Plan, sharding_conflict
from memfit.strategies.read_configuration import Configuration
from memfit.strategies.sharding import sharding_of_model

_APPLIED: weakref.WeakKeyDictionary[nn.Module, ExitStack] = weakref.WeakKeyDictionary()


def apply(model: nn.Module, plan: Any, *, optimizer: Optimizer | None = None) -> nn.Module:
    """Apply a plan to a model in place, for use with your own training loop.

    Args:
        model: keeps its modules, their names and its ``state_dict``.
        plan: a ``Plan``, a strategy's settings, or a list of them. Accumulation belongs to the training loop;
            ``Engine`` handles that. Of a file that ``memfit plan`` wrote, accumulation is left to your loop.
        optimizer: the model's, before its first step; needed if the plan has ``OptimizerState``. Your loop
            calls its ``step`` and ``zero_grad`` as before. With ``step_in_backward``, a loop that uses
            gradients between backward and ``step``, to clip them for example, gets a ``UsageError`` there.

    Returns:
        The model; with ``Sharding("ddp")`` or ``"zero1"``, the model in a DistributedDataParallel. Create the
        optimizer afterwards.

    Raises:
        UsageError: the model already has a plan, a strategy does not suit it, or the plan needs ``Engine`` or
            an optimizer.

    >>> from memfit.strategies.precision import Precision
    >>> model = apply(nn.Linear(2, 2), Precision("bf16", autocast=False))
    >>> model.weight.dtype, revert(model).weight.dtype
    (torch.bfloat16, torch.float32)
    """
    if called_module(model) is not model:
        apply(called_module(model), plan, optimizer=optimizer)
        return model
    configuration = Configuration.of(plan)
    in_loop = isinstance(plan, str | PathLike) and Path(plan).suffix == ".json"
    plan = replace(configuration.plan, accumulation=None) if in_loop else configuration.plan
    if configuration.max_grad_norm is not None:
        raise UsageError(
            "memfit.apply cannot use max_grad_norm, which applies to the training loop. Clip gradients in "
            "your loop, or use memfit.Engine."
        )
    if configuration.arena is not None:
        raise UsageError(
            "memfit.apply cannot use the settings of the arena, which apply to the training loop. Call "
            "memfit.arena(configuration) and memfit.apply(model, configuration.plan), or use memfit.Engine."
        )
    _expect_optimizer(plan, optimizer)
    for strategy in plan.strategies():
        if not hasattr(strategy, "apply") and strategy not in (plan.sharding, plan.optimizer_state):
            raise UsageError(
                f"memfit.apply cannot use {type(strategy).__name__}, which applies to the training loop. "
                f"Pass the plan to memfit.Engine, or leave out {type(strategy).__name__}."
            )
    if plan.precision is not None and plan.precision.loop:
        raise UsageError(
            f"memfit.apply cannot use {plan.precision.loop}, which applies to the training "
            f"loop. Pass the plan to memfit.Engine, or leave out {plan.precision.loop}."
        )
    apply_to_model(model, replace(plan, sharding=None))
    try:
        if plan.optimizer_state is not None and optimizer is not None:
            add_step_to_revert(model, apply_to_optimizer(optimizer, [model], plan.optimizer_state).undo)
        return model if plan.sharding is None else plan.sharding.shard(model)
    except Exception:
        revert(model)
        raise


def _expect_optimizer(plan: Plan, optimizer: Optimizer | None) -> None:
    """Check that there is an optimizer if the plan has settings for one."""
    if plan.optimizer_state is None:
        return
    if optimizer is None:
        raise UsageError(
            "The plan has optimizer_state: create the optimizer first, and write memfit.apply(model, plan, "
            "optimizer=optimizer); or pass the plan to memfit.Engine."
        )
    if plan.sharding is not None:
        raise UsageError(
            "memfit.apply cannot use optimizer_state together with sharding, which needs the optimizer to be "
            "created afterwards. Pass the plan to memfit.Engine, or leave out one of the two."
        )


def apply_to_model(model: nn.Module, plan: Plan, *, in_engine: bool = False) -> Plan:  # noqa: ARG001
    """Apply a plan's strategies that change the model: all of them, or none if one does not suit.

    The plan's sharding is left to the caller: it replaces the model or its parameters. So is its
    ``optimizer_state``.

    Args:
        model: without a plan so far.
        plan: whose strategies to apply.
        in_engine: whether the caller is an engine, which carries out the rest of the plan that it gets back:
            for ``inject_plan``, which may complete the plan.

    Returns:
        The plan.
    """
    if conflict := sharding_conflict(plan, sharding_of_model(model)):
        raise UsageError(conflict)
    if model in _APPLIED:
        raise UsageError("The model already has a plan: call memfit.revert(model) to remove it first.")
    _expect_unwrapped(model, "be given a plan")
    with ExitStack() as undo:
        for strategy in plan.strategies():
            if hasattr(strategy, "apply"):
                undo.callback(strategy.apply(model))
        if any(hasattr(strategy, "apply") for strategy in plan.strategies()):
            _APPLIED[model] = undo.pop_all()
    return plan


@dataclass(frozen=True, slots=True, eq=False)
class AppliedToOptimizer:
    """The objects that carry out the settings of an optimizer, and the function that undoes it."""

    offloaded: OffloadedOptimizerState | None = None
    """Steps in the optimizer's place, and keeps its state on the host."""
    in_backward: StepInBackward | None = None
    """Updates parameters in backward."""
    undo: Callable[[], None] = lambda: None
    """Undoes all but ``bits``, ``implementation`` and float32 copies."""


def apply_to_optimizer(
    optimizer: Optimizer,
    models: Iterable[nn.Module],
    state: OptimizerState,
    *,
    refuse: Callable[[str], None] = raise_loop_unsuitable_error,
    masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
    guarded: bool = True,
) -> AppliedToOptimizer:
    """Have an optimizer use a plan's settings in the loop that steps it.

    Args:
        optimizer: the only one that has its parameters.
        models: those whose parameters it updates.
        state: the settings.
        refuse: called with the reason if, later on, the loop turns out not to suit ``step_in_backward``.
        masters: float32 copies that the optimizer updates in place of parameters.
        guarded: whether the loop may use gradients after backward, which ``step_in_backward`` then refuses.

    Raises:
        UsageError: the settings do not suit the optimizer.
    """
    if state != OptimizerState():
        check_step_is_not_replaced(optimizer)
    state.optimizer(optimizer, *models)
    with ExitStack() as undo:
        if masters:
            replace_optimizer_parameters(optimizer, masters)
        offloaded = in_backward = None
        if state.offload:
            blocks = 0 if state.step_in_backward else BLOCK_BYTES
            updated = function_to_round_into_parameters(masters) if masters else None
            offloaded = OffloadedOptimizerState(optimizer, blocks, updated)
            undo.callback(replace_optimizer_step(optimizer, offloaded.step))
            undo.callback(_fetch_state, weakref.ref(optimizer), weakref.ref(offloaded))
            offloaded.send_all()
        if state.step_in_backward:
            in_backward = StepInBackward(optimizer, offloaded, refuse)
            for hook in in_backward.hooks():
                undo.callback(hook.remove)
            if guarded:
                undo.callback(GradientGuard(optimizer, in_backward, refuse).remove)
        return AppliedToOptimizer(offloaded, in_backward, undo.pop_all().close)


def _fetch_state(optimizer: weakref.ref[Optimizer], offloaded: weakref.ref[OffloadedOptimizerState]) -> None:
    """Move an optimizer's state back to the device, where its own ``step`` needs it.

    The model's plan holds neither strongly: their memory is freed with the script's last reference.
    """
    held = offloaded()
    if optimizer() is not None and held is not None:
        held.fetch_all()


def add_step_to_revert(model: nn.Module, step: Callable[[], None], *, last: bool = False) -> None:
    """Have ``revert`` run one more step, before or after the others, such as removing an engine's hooks."""
    steps = [_APPLIED.pop(model, ExitStack()).close, step]
    undo = _APPLIED[model] = ExitStack()
    for each in reversed(steps) if last else steps:
        undo.callback(each)


def revert(model: nn.Module) -> nn.Module:
    """Undo what ``apply`` did to a model; do nothing if it has no plan. Sharding stays as it is.

    Values that were cast to lower precision are cast back; what rounding lost stays lost, except for
    parameters of which an engine holds float32 copies (``master_weights``).

    Raises:
        UsageError: the model is a copy of a model with a plan, or a part of one.
    """
    inside = model.module if isinstance(model, DistributedDataParallel) else called_module(model)
    if inside is not model:
        revert(inside)
        return model
    undo = _APPLIED.pop(model, None)
    if undo is not None:
        undo.close()
    else:
        _expect_unwrapped(model, "be reverted")
    return model


def remove_copied_plan(model: nn.Module) -> None:
    """Remove the wrappers that a copy of a model has from the original's plan."""
    if model not in _APPLIED:
        remove_wrappers(model)


def _expect_unwrapped(model: nn.Module, action: str) -> None:
    wrapped = [name for name, part in model.named_modules() if any(forward_wrappers(part))]
    if wrapped:
        where = f" (in module {wrapped[0]!r})" if wrapped[0] else ""
        raise UsageError(
            f"The model cannot {action}: it contains the wrappers of a plan{where}. It is a submodule or a "
            "copy of a model that has this plan. If it is a submodule, call memfit.revert on the whole "
            "model first. If it is a copy, change the order: copy the original before you pass the original "
            "to memfit.apply or memfit.Engine."
        )
