"""Applying a plan to a model in place, and taking it back."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from memfit.errors import UsageError
from memfit.strategies.configuration import Configuration
from memfit.strategies.mechanisms.wrap_forward import wrappers
from memfit.strategies.plan import Plan

_APPLIED: WeakKeyDictionary[nn.Module, ExitStack] = WeakKeyDictionary()


def apply(model: nn.Module, plan: Any) -> nn.Module:
    """Change a model in place as a plan says, for a training loop of one's own.

    Args:
        model: keeps its modules, their names and its ``state_dict``.
        plan: a ``Plan``, a strategy's settings, or a list of them. Accumulation and optimizers are matters of
            the loop: ``Engine`` does those.

    Returns:
        The model.

    Raises:
        UsageError: it has a plan already; a strategy does not suit it; or the plan needs ``Engine``.

    >>> from memfit.strategies.precision import Precision
    >>> model = apply(nn.Linear(2, 2), Precision("bf16", autocast=False))
    >>> model.weight.dtype, revert(model).weight.dtype
    (torch.bfloat16, torch.float32)
    """
    configuration = Configuration.of(plan)
    plan = configuration.plan
    if configuration.max_grad_norm is not None:
        raise UsageError("max_grad_norm is a matter of the training loop: clip there, or use memfit.Engine.")
    for strategy in plan.strategies():
        if not hasattr(strategy, "apply"):
            raise UsageError(
                f"{type(strategy).__name__} is a matter of the training loop: give the plan to "
                "memfit.Engine, or leave it out here."
            )
    if plan.precision is not None and plan.precision.loop:
        raise UsageError(
            f"Precision: {plan.precision.loop} is a matter of the training loop: give the plan to "
            "memfit.Engine, or leave it out here."
        )
    return apply_to_model(model, plan)


def apply_to_model(model: nn.Module, plan: Plan) -> nn.Module:
    """Apply those strategies of a plan that change the model: all of them, or none if one does not suit."""
    if model in _APPLIED:
        raise UsageError("The model has a plan already: memfit.revert(model) takes it back.")
    _expect_unwrapped(model, "have a plan")
    with ExitStack() as undo:
        for strategy in plan.strategies():
            if hasattr(strategy, "apply"):
                undo.callback(strategy.apply(model))
        if any(hasattr(strategy, "apply") for strategy in plan.strategies()):
            _APPLIED[model] = undo.pop_all()
    return model


def on_revert(model: nn.Module, step: Callable[[], None], *, last: bool = False) -> None:
    """Have ``revert`` do something more, before or after all else: what an engine has put on parameters."""
    steps = [_APPLIED.pop(model, ExitStack()).close, step]
    undo = _APPLIED[model] = ExitStack()
    for one in reversed(steps) if last else steps:
        undo.callback(one)


def revert(model: nn.Module) -> nn.Module:
    """Take back what ``apply`` did to a model; nothing if it did nothing.

    What was cast to lower precision is cast back: what rounding took stays lost, but for parameters of which
    an engine holds float32 copies (``master_weights``).

    Raises:
        UsageError: it is a copy of a model with a plan, or a part of one.
    """
    undo = _APPLIED.pop(model, None)
    if undo is not None:
        undo.close()
    else:
        _expect_unwrapped(model, "be reverted")
    return model


def _expect_unwrapped(model: nn.Module, what: str) -> None:
    wrapped = [name for name, part in model.named_modules() if any(wrappers(part))]
    if wrapped:
        raise UsageError(
            f"The model cannot {what}: {wrapped[0] or 'it'} runs as the plan of another model says, of which "
            "it is a copy, or which it is a part of. Copy the model before memfit.apply and memfit.Engine, "
            "or revert the other one first."
        )
