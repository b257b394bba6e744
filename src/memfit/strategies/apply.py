"""Apply a plan to a model in place, and revert it."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from memfit.errors import UsageError
from memfit.strategies.apply_to_optimizer import apply_to_optimizer
from memfit.strategies.configuration import Configuration
from memfit.strategies.mechanisms.wrap_forward import wrappers
from memfit.strategies.plan import Plan, sharding_conflict
from memfit.strategies.sharding import sharding_of

_APPLIED: WeakKeyDictionary[nn.Module, ExitStack] = WeakKeyDictionary()


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
            on_revert(model, apply_to_optimizer(optimizer, [model], plan.optimizer_state))
        return model if plan.sharding is None else plan.sharding.shard(model)
    except Exception:
        revert(model)
        raise


def _expect_optimizer(plan: Plan, optimizer: Optimizer | None) -> None:
    """Check that there is an optimizer if the plan has settings for one.

    Raises:
        UsageError: there is none; or the model is to be sharded, which replaces its parameters.
    """
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


def apply_for_engine(model: nn.Module, plan: Plan) -> Plan:
    """Do what ``apply_to_model`` does, for an engine, which carries out the rest of the plan it gets back."""
    return apply_to_model(model, plan)


def apply_to_model(model: nn.Module, plan: Plan) -> Plan:
    """Apply a plan's strategies that change the model: all of them, or none if one does not suit.

    The plan's sharding is left to the caller: it replaces the model or its parameters. So is its
    ``optimizer_state``.

    Returns:
        The plan, which ``inject_plan`` may have completed.

    Raises:
        UsageError: one does not suit.
    """
    if conflict := sharding_conflict(plan, sharding_of(model)):
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


def on_revert(model: nn.Module, step: Callable[[], None], *, last: bool = False) -> None:
    """Have ``revert`` run one more step, before or after the others: an engine removes its hooks so."""
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
    if isinstance(model, DistributedDataParallel):
        revert(model.module)
        return model
    undo = _APPLIED.pop(model, None)
    if undo is not None:
        undo.close()
    else:
        _expect_unwrapped(model, "be reverted")
    return model


def _expect_unwrapped(model: nn.Module, action: str) -> None:
    wrapped = [name for name, part in model.named_modules() if any(wrappers(part))]
    if wrapped:
        where = f" (in module {wrapped[0]!r})" if wrapped[0] else ""
        raise UsageError(
            f"The model cannot {action}: it contains the wrappers of a plan{where}. It is a submodule or a "
            "copy of a model that has this plan. If it is a submodule, call memfit.revert on the whole "
            "model first. If it is a copy, change the order: copy the original before you pass the original "
            "to memfit.apply or memfit.Engine."
        )
