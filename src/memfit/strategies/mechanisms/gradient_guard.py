"""Notice a loop that uses gradients which backward has already used for updates, and freed.

backward: update, free ── clip_grad_norm_ ── optimizer.step() ── zero_grad()
                          reads .grad: refused     │                │
                          the update is complete ──┘                may read it: nothing is left to use

A loop that finds no gradients may well run on: it would clip, scale or drop nothing, and train otherwise than
it says.
"""

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memfit.errors import UsageError
from memfit.patching.patches import Patch
from memfit.strategies.mechanisms.optimizer_info import optimizer_name, parameters_of
from memfit.strategies.mechanisms.step_in_backward import StepInBackward, raise_usage_error
from memfit.user_frame import innermost_line, is_user_file, user_line

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
        refuse: Callable[[str], None] = raise_usage_error,
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
    line = innermost_line(user_line(reader))
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if not frame.f_code.co_name.startswith(("_", "<")):
            return f"{frame.f_code.co_name} ({line})" if line else frame.f_code.co_name
        frame = frame.f_back
    return line or "the script"
