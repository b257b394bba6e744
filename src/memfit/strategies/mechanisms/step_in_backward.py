"""Updating each parameter in backward, as soon as its gradient is complete.

backward of layer n ──┬── of layer n-1 ──┬── ...        the step at the end finds no gradient left
step, free         step, free
"""

import functools
import weakref

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memfit.errors import UsageError
from memfit.strategies.mechanisms.optimizer_info import name_of


class StepInBackward:
    """Updates each parameter in backward, and frees its gradient.

    The optimizer stays the one that counts: its groups, state, ``state_dict`` and scheduler. Its ``step``,
    at the end, finds no gradient left and only closes the window.

    Args:
        optimizer: one that treats each parameter by itself.

    Raises:
        UsageError: it does not, or it is not known to; or it has hooks that want to see gradients.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        module = type(optimizer).step.__module__
        if not module.startswith(("torch.optim.", "torchao.", "bitsandbytes.")) or isinstance(
            optimizer, torch.optim.LBFGS
        ):
            raise UsageError(
                f"step_in_backward: {name_of(optimizer)} is not known to update each parameter by itself; "
                "PyTorch's (but LBFGS), torchao's and bitsandbytes' are."
            )
        if optimizer._optimizer_step_pre_hooks:
            raise UsageError("step_in_backward: hooks before the optimizer's step would find no gradients.")
        # Parameters hold this, so it holds neither them nor the optimizer: memory is freed when the script's
        # last name for them goes, not when the collector runs.
        self._optimizer = weakref.ref(optimizer)
        self.active = True
        """Whether gradients are used: an engine says no between its windows, when backwards are others'."""
        self.stepped: set[torch.Tensor] = set()
        """Parameters whose update was begun since the last ``optimizer.step``."""
        # Without the wrapper that calls step hooks, which are for whole steps.
        self._step = getattr(type(optimizer).step, "__wrapped__", type(optimizer).step)
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._update, index))
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.stepped.clear()))

    def hooks(self) -> list[RemovableHandle]:
        """Return the hooks of the parameters and of the optimizer, to be removed."""
        return self._hooks

    def _update(self, index: int, parameter: torch.Tensor) -> None:
        """Update a parameter of a group, if nobody else took its gradient and there still is an optimizer."""
        optimizer = self._optimizer()
        if parameter.grad is None or optimizer is None or not self.active:
            return
        if parameter in self.stepped:
            raise UsageError(
                f"step_in_backward: a parameter of shape {tuple(parameter.shape)} got its gradient in two "
                "pieces, and the first is used already. One backward to a step; and a module that two "
                "reentrant checkpoints share needs use_reentrant=False."
            )
        self.stepped.add(parameter)  # before, for a step that fails may have changed its state
        with torch.no_grad():
            self._step(_with_only(optimizer, index, parameter))
        parameter.grad = None


def _with_only(optimizer: Optimizer, index: int, parameter: torch.Tensor) -> Optimizer:
    """Return an optimizer as it is now, with one parameter of a group: another object, the same state.

    The object itself is not narrowed, for backward runs in one thread for each device.
    """
    group = optimizer.param_groups[index]
    one: Optimizer = object.__new__(type(optimizer))
    vars(one).update(vars(optimizer), param_groups=[group | {"params": [parameter]}])
    return one
