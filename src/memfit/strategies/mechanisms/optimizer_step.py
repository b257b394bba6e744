"""An optimizer's step: below what has been put around it, and for some of its parameters only.

script ── scheduler's count of calls ── updates that are held back ── own step: the class's, or another
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import UsageError
from memfit.recording.optimizer_accessors import optimizer_name

_OWN = "_memfit_own_step"


def unwrapped_optimizer_step(optimizer: Optimizer) -> Callable[..., Any]:
    """Return what makes an optimizer's update, hooks included."""
    replaced: Callable[..., Any] | None = vars(optimizer).get(_OWN)
    return functools.partial(type(optimizer).step, optimizer) if replaced is None else replaced


def mark_as_step_wrapper(step: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function that stands for an optimizer's ``step`` and calls ``unwrapped_optimizer_step``."""
    step.calls_own_step = True  # type: ignore[attr-defined]
    return step


def check_step_is_not_replaced(optimizer: Optimizer) -> None:
    """Check that an optimizer's ``step`` calls its own step, or was replaced by a scheduler alone."""
    step = vars(optimizer).get("step")
    if not (step is None or hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "calls_own_step")):
        raise UsageError(
            f"The step method of {optimizer_name(optimizer)} was replaced by another function, so the plan's "
            "optimizer_state cannot be applied. Apply the plan first, then replace the step method."
        )


def replace_optimizer_step(optimizer: Optimizer, own: Callable[..., Any]) -> Callable[[], None]:
    """Give an optimizer another own step, after ``check_step_is_not_replaced``; return what undoes that."""
    vars(optimizer)[_OWN] = own
    if not hasattr(vars(optimizer).get("step"), "calls_own_step"):
        vars(optimizer)["step"] = step_tracked_by_schedulers(optimizer)
    reference = weakref.ref(optimizer)

    def undo() -> None:
        held = reference()
        if held is not None:
            vars(held).pop(_OWN, None)

    return undo


def guard_optimizer_step(optimizer: Optimizer, may_step: Callable[[], bool]) -> None:
    """Have an optimizer leave out each update of its own step for which ``may_step`` returns False.

    A closure runs before that is asked. An own step that is guarded already stays so.
    """
    own = vars(optimizer).get(_OWN)
    if hasattr(own, "is_guard"):
        return
    check_step_is_not_replaced(optimizer)
    reference = weakref.ref(optimizer)
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    needs_closure = parameter is not None and parameter.default is parameter.empty

    def guarded(closure: Callable[[], Any] | None = None, **others: Any) -> Any:
        held, loss = reference(), None
        if closure is not None and held is not None:
            if needs_closure:
                raise UsageError(
                    f"precision: {optimizer_name(held)} evaluates the model several times in an update, and "
                    "under fp16 memfit leaves out an update after one evaluation, if its gradients are not "
                    "finite. Use bf16, or another optimizer."
                )
            with torch.enable_grad():
                loss = closure()
        if held is not None and may_step():
            made = type(held).step(held, **others) if own is None else own(**others)
            return made if closure is None else loss
        return loss

    guarded.is_guard = True  # type: ignore[attr-defined]
    replace_optimizer_step(optimizer, guarded)


def step_tracked_by_schedulers(optimizer: Optimizer) -> Callable[..., Any]:
    """Return a step that records for schedulers that it was called.

    Source: ``patch_track_step_called`` in torch/optim/lr_scheduler.py, 2.14.
    """
    reference = weakref.ref(optimizer)

    @functools.wraps(type(optimizer).step)
    def tracked(*args: Any, **kwargs: Any) -> Any:
        held = reference()
        if held is None:
            raise ReferenceError("the optimizer no longer exists")
        held._opt_called = True  # type: ignore[attr-defined]
        return unwrapped_optimizer_step(held)(*args, **kwargs)

    tracked._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return mark_as_step_wrapper(tracked)


def check_updates_are_independent(optimizer: Optimizer, setting: str) -> None:
    """Check that an optimizer updates each parameter independently of the others."""
    module = type(optimizer).step.__module__
    if not module.startswith(("torch.optim.", "torchao.", "bitsandbytes.")) or isinstance(
        optimizer, torch.optim.LBFGS
    ):
        raise UsageError(
            f"{setting} needs an optimizer that updates each parameter independently. memfit does not know "
            f"whether {optimizer_name(optimizer)} does so. Use an optimizer from PyTorch (except LBFGS), "
            "torchao or bitsandbytes."
        )


def step_some_parameters(optimizer: Optimizer, index: int, parameters: Iterable[nn.Parameter]) -> None:
    """Update some parameters of one group, without calling step hooks, which are for whole steps.

    The optimizer's own groups stay as they are: backward, which may call this, runs in one thread per device.
    """
    group = optimizer.param_groups[index]
    narrowed: Optimizer = object.__new__(type(optimizer))
    vars(narrowed).update(vars(optimizer), param_groups=[group | {"params": list(parameters)}])
    step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
    with torch.no_grad():
        step(narrowed)
