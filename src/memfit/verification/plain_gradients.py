"""Have a script's updates get the gradients of its backward, and nothing that runs cannot share.

Clipping and loss scaling act on what a batch sums up to, but a loop that knows no micro-batches does both
after each of them. Micro-batches draw other numbers in dropout than the whole batch does.
"""

from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad

from memfit.patching.installed_hooks import InstalledHooks

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_POSITION = {"training": 2, "dropout_p": 4}
"""Of arguments that switch dropout off, where they are not named.

Source: torch/nn/functional.py, PyTorch 2.14.1.
"""


def leave_gradients_alone(hooks: InstalledHooks) -> None:
    """Have nothing clip or scale gradients."""
    for owner in (torch.nn.utils, clip_grad):
        hooks.wrap(owner, "clip_grad_norm_", _norm)
        hooks.wrap(owner, "clip_grad_value_", _nothing)
    hooks.wrap(torch.amp.GradScaler, "__init__", _disabled)


def switch_dropout_off(hooks: InstalledHooks) -> None:
    """Have PyTorch's dropouts, and that of attention, drop nothing."""
    for name in _DROPOUTS:
        hooks.wrap(functional, name, _without("training", value=False))
    hooks.wrap(functional, "scaled_dot_product_attention", _without("dropout_p", value=0.0))


def _norm(original: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    return original(parameters, float("inf"), *args, **kwargs)


def _nothing(_original: Any, *_args: Any, **_kwargs: Any) -> None:
    """Do nothing."""


def _disabled(original: Any, scaler: Any, device: str = "cuda", *_args: Any, **_kwargs: Any) -> None:
    original(scaler, device, enabled=False)


def _without(name: str, *, value: float) -> Any:
    position = _POSITION[name]

    def without(original: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > position:
            args = (*args[:position], value, *args[position + 1 :])
        else:
            kwargs[name] = value
        return original(*args, **kwargs)

    return without
