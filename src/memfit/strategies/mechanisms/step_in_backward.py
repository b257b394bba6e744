"""Update each parameter in backward, as soon as its gradient is complete.

backward of layer n ──┬── of layer n-1 ──┬── ...        the step at the end finds no gradient left
step, free         step, free
"""

import functools
import weakref
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memfit.dispatch_modes import without_dispatch_modes
from memfit.errors import UsageError
from memfit.strategies.mechanisms.offloaded_state import OffloadedState
from memfit.strategies.mechanisms.partial_step import expect_independent, step_only


def raise_usage_error(why: str) -> None:
    """Raise an error for a loop in which backward cannot make the updates."""
    raise UsageError(why)


class StepInBackward:
    """Updates each parameter in backward, and frees its gradient.

    The optimizer keeps its groups, state, ``state_dict`` and scheduler. Its ``step``, at the end, finds no
    gradient left and only closes the window.

    Args:
        optimizer: one that updates each parameter independently of the others.
        offloaded: its state, if that waits on the host between updates.
        refuse: called with the reason if backward cannot make the updates of this loop.

    Raises:
        UsageError: it does not, or is not known to; or it has hooks that need to see gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        offloaded: OffloadedState | None = None,
        refuse: Callable[[str], None] = raise_usage_error,
    ) -> None:
        expect_independent(optimizer, "step_in_backward")
        if optimizer._optimizer_step_pre_hooks:
            raise UsageError(
                "step_in_backward: the optimizer has hooks from register_step_pre_hook. These hooks would "
                "find no gradients. Remove them, or leave out step_in_backward."
            )
        # Parameters hold this object, so it holds neither them, nor the optimizer, nor its state strongly:
        # their memory is freed with the script's last reference, not when the garbage collector runs.
        self._optimizer = weakref.ref(optimizer)
        self._offloaded = None if offloaded is None else weakref.ref(offloaded)
        self._refuse = refuse
        self.updating = False
        """Whether a parameter is being updated."""
        self.active = True
        """Whether gradients are used. An engine clears it between its windows, when a backward is not its
        own."""
        self.stepped: set[torch.Tensor] = set()
        """Parameters whose update began after the last ``optimizer.step``."""
        self._hooks: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._update, index))
            for index, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.stepped.clear()))

    def hooks(self) -> list[RemovableHandle]:
        """Return the hooks on parameters and optimizer, for removal."""
        return self._hooks

    def _update(self, index: int, parameter: nn.Parameter) -> None:
        """Update a parameter of a group, if its gradient and the optimizer still exist."""
        optimizer = self._optimizer()
        if parameter.grad is None or optimizer is None or not self.active:
            return
        if parameter in self.stepped:
            self._refuse(
                f"step_in_backward: a parameter of shape {tuple(parameter.shape)} received its gradient in "
                "two parts. It was updated after the first part alone. Call backward only once per step. If "
                "two checkpointed modules share a submodule, set use_reentrant=False."
            )
        self.stepped.add(parameter)  # first: a step that fails may have changed its state
        offloaded = None if self._offloaded is None else self._offloaded()
        self.updating = True
        with without_dispatch_modes():  # an update is no part of the backward, for what counts operations
            if offloaded is None:
                step_only(optimizer, index, [parameter])
            else:
                offloaded.update(index, [parameter])
        self.updating = False
        parameter.grad = None
