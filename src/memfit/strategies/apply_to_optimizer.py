"""Carry out a plan's ``OptimizerState`` in a loop that is not memfit's: the loop calls ``optimizer.step``.

bits, implementation    the optimizer becomes another, in place
offload                 its step becomes that of ``OffloadedState``
step_in_backward        hooks on its parameters; ``step`` and ``zero_grad`` find nothing left to do
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from torch import nn
from torch.optim import Optimizer

from memfit.strategies.mechanisms.gradient_guard import GradientGuard
from memfit.strategies.mechanisms.offloaded_state import BLOCK_BYTES, OffloadedState
from memfit.strategies.mechanisms.own_step import expect_own_step, replace_own_step
from memfit.strategies.mechanisms.step_in_backward import StepInBackward, raise_usage_error
from memfit.strategies.optimizer_state import OptimizerState


def apply_to_optimizer(
    optimizer: Optimizer,
    models: Iterable[nn.Module],
    state: OptimizerState,
    refuse: Callable[[str], None] = raise_usage_error,
) -> Callable[[], None]:
    """Have an optimizer use a plan's settings in the loop that steps it.

    Args:
        optimizer: the only one that has its parameters.
        models: those whose parameters it updates.
        state: the settings.
        refuse: called with the reason if, later on, the loop turns out not to suit ``step_in_backward``.

    Returns:
        What undoes it, but for ``bits`` and ``implementation``.

    Raises:
        UsageError: the settings do not suit the optimizer.
    """
    expect_own_step(optimizer)
    state.optimizer(optimizer, *models)
    with ExitStack() as undo:
        offloaded = _offloaded(optimizer, state, undo) if state.offload else None
        if state.step_in_backward:
            in_backward = StepInBackward(optimizer, offloaded, refuse)
            for hook in in_backward.hooks():
                undo.callback(hook.remove)
            undo.callback(GradientGuard(optimizer, in_backward, refuse).remove)
        return undo.pop_all().close


def _offloaded(optimizer: Optimizer, state: OptimizerState, undo: ExitStack) -> OffloadedState:
    """Move an optimizer's state to the host between its steps; ``undo`` moves it back."""
    offloaded = OffloadedState(optimizer, 0 if state.step_in_backward else BLOCK_BYTES)
    reference = weakref.ref(optimizer)  # or the model's plan would keep the optimizer alive

    def fetch_all() -> None:
        if reference() is not None:
            offloaded.fetch_all()

    undo.callback(replace_own_step(optimizer, offloaded.step))
    undo.callback(fetch_all)
    offloaded.send_all()
    return offloaded
