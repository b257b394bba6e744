"""Update each parameter in backward, as soon as its gradient is complete.

backward of layer n ──┬── of layer n-1 ──┬── ...        the step at the end finds no gradient left
step, free         step, free

A loop that uses gradients after backward finds none, and may well run on: it would clip, scale or drop
nothing, and train otherwise than it says. A guard refuses it:

backward: update, free ── clip_grad_norm_ ── optimizer.step() ── zero_grad()
                          reads .grad: refused     │                │
                          the update is complete ──┘                may read it: nothing is left to use
"""

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from memfit.dispatch_modes import without_dispatch_modes
from memfit.errors import UsageError
from memfit.patching.patches import Patch
from memfit.recording.optimizer_accessors import optimizer_name, parameters_of
from memfit.strategies.mechanisms.offloaded_optimizer_state import OffloadedOptimizerState
from memfit.strategies.mechanisms.optimizer_step import check_updates_are_independent, step_some_parameters
from memfit.user_lines import innermost_line_of_place, innermost_user_line, is_user_file


def raise_loop_unsuitable_error(why: str) -> None:
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
        offloaded: OffloadedOptimizerState | None = None,
        refuse: Callable[[str], None] = raise_loop_unsuitable_error,
    ) -> None:
        check_updates_are_independent(optimizer, "step_in_backward")
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
                step_some_parameters(optimizer, index, [parameter])
            else:
                offloaded.update(index, [parameter])
        self.updating = False
        parameter.grad = None


_PARAMETER = Patch("torch.nn.parameter:Parameter", "grad", why="notice who reads used gradients")
_OPTIMIZERS = ("torch.optim.", "torchao.", "bitsandbytes.")
_SCALED = (
    "step_in_backward: a GradScaler scales the loss, and divides gradients only after backward, which has "
    "used them by then. Leave out step_in_backward, or train in bf16."
)


class GradientGuard:
    """Watches who reads the gradients of parameters that backward has updated, until ``optimizer.step``.

    Args:
        optimizer: has all its parameters as ``nn.Parameter``, and no other optimizer has them.
        in_backward: makes its updates.
        refuse: called with the reason if the script uses gradients.

    Raises:
        UsageError: a tensor of the optimizer is no ``nn.Parameter``, whose gradient memfit cannot guard.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        in_backward: StepInBackward,
        refuse: Callable[[str], None] = raise_loop_unsuitable_error,
    ) -> None:
        if not all(isinstance(each, nn.Parameter) for each in parameters_of(optimizer)):
            raise UsageError(
                f"step_in_backward: {optimizer_name(optimizer)} has tensors that are no nn.Parameter, and "
                "memfit cannot see whether the loop uses their gradients. Make them parameters of a module."
            )
        self._in_backward, self._refuse = in_backward, refuse
        self._stepping = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        if not _guards:
            _removals.append(_PARAMETER.install("grad", lambda _: _WATCHED))
        _guards.add(self)  # which lives as long as these hooks

    def remove(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        _guards.discard(self)
        while _removals and not _guards:
            _removals.pop()()

    def check(self, parameter: nn.Parameter, reader: FrameType) -> None:
        """Refuse if a frame uses a gradient that backward has freed."""
        if parameter not in self._in_backward.stepped:
            return
        module = str(reader.f_globals.get("__name__", ""))
        updating = self._stepping or self._in_backward.updating
        if module.startswith("memfit.") or (updating and module.startswith(_OPTIMIZERS)):
            return
        self._refuse(
            f"step_in_backward: {_name(reader)} uses gradients that backward has already used for updates "
            "and freed. What needs all gradients at once, such as clipping by their norm or loss scaling, "
            "cannot be combined with it. Leave out step_in_backward."
        )

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._stepping = True
        if getattr(optimizer, "grad_scale", None) is not None:  # fused: GradScaler leaves the division to it
            self._refuse(_SCALED)

    def _after_step(self, *_: Any) -> None:
        self._stepping = False


_guards: weakref.WeakSet[GradientGuard] = weakref.WeakSet()
_removals: list[Callable[[], None]] = []
_PLAIN: Any = torch.Tensor.grad  # PyTorch's own descriptor


def _read(parameter: nn.Parameter) -> Any:
    for guard in tuple(_guards):
        guard.check(parameter, sys._getframe(1))
    return _PLAIN.__get__(parameter)


def _write(parameter: nn.Parameter, gradient: torch.Tensor | None) -> None:
    for guard in tuple(_guards):
        guard.check(parameter, sys._getframe(1))
    _PLAIN.__set__(parameter, gradient)


_WATCHED: Any = property(_read, _write, _PLAIN.__delete__)


def _name(reader: FrameType) -> str:
    """Return the innermost function of a library that reads, and the user's line that calls it."""
    frame: FrameType | None = reader
    line = innermost_line_of_place(innermost_user_line(reader))
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if not frame.f_code.co_name.startswith(("_", "<")):
            return f"{frame.f_code.co_name} ({line})" if line else frame.f_code.co_name
        frame = frame.f_back
    return line or "the script"
