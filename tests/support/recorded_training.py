"""Train a script on the CPU and keep what it computed: ``FILE DTYPE SCRIPT.py ARGS...`` as arguments.

``FILE`` receives the losses of three backward passes, or of as many as the first update takes, and the
gradients of that update, of large ones every n-th value. Nothing drops, clips, scales or casts. In float64,
everything that the script makes in float32 is float64.
"""

import runpy
import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch
from memfit.verification.make_runs_comparable import (
    install_cpu_stand_in,
    switch_dropout_off,
    switch_gradient_changes_off,
)

LOSSES = 3
"""Of passes, at least."""
VALUES = 100_000
"""Kept of one gradient."""
_BACKWARD = Patch("torch:Tensor", "backward", why="see the losses")


class Float64(TorchFunctionMode):
    """Computes in float64 where a script asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        result = func(*map(_wide, args), **{name: _wide(value) for name, value in (kwargs or {}).items()})
        narrow = isinstance(result, torch.Tensor) and result.dtype is torch.float32
        return result.double() if narrow else result


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class _Enough(BaseException):
    """Ends the script."""


def main() -> None:
    """Run the script on the command line."""
    file, dtype = sys.argv[1:3]
    sys.argv = sys.argv[3:]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)  # as `python SCRIPT.py` has it
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    hooks = InstalledHooks()
    switch_gradient_changes_off(hooks)
    switch_dropout_off(hooks)
    install_cpu_stand_in(hooks)
    torch.autocast = partial(torch.autocast, enabled=False)  # bf16 rounds to 3 digits
    losses: list[float] = []
    gradients: list[torch.Tensor] = []

    inside = False

    def backward(original: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal inside
        if inside:  # a mode calls the method again
            original(loss, *args, **kwargs)
            return
        inside = True
        original(loss, *args, **kwargs)
        inside = False
        losses.append(loss.item())
        if len(losses) >= LOSSES and gradients:  # an update may take more passes
            raise _Enough

    def before_step(optimizer: Any, *_: Any) -> None:
        if not gradients:
            gradients.extend(
                parameter.grad.flatten()[:: parameter.numel() // VALUES + 1].clone()
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            )

    hooks.wrap(_BACKWARD, "backward", backward)
    register_optimizer_step_pre_hook(before_step)
    with suppress(_Enough), Float64() if dtype == "float64" else nullcontext():
        runpy.run_path(sys.argv[0], run_name="__main__")
    torch.save((losses, gradients), file)


if __name__ == "__main__":
    main()
