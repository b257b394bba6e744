"""Have a script's updates get the gradients of its backward, and nothing that runs cannot share.

Clipping and loss scaling act on what a batch sums up to, but a loop that knows no micro-batches does both
after each of them. Micro-batches draw other numbers in dropout than the whole batch does.
"""

from typing import Any

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_CLIPPING = Patch(
    "torch.nn.utils.clip_grad",
    *("clip_grad_norm_", "clip_grad_value_"),
    also="torch.nn.utils",
    why="leave the gradients of a backward as they are",
)
_SCALER = Patch("torch.amp.grad_scaler:GradScaler", "__init__", why="leave losses unscaled")
_DROPOUTS = Patch(
    "torch.nn.functional",
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    why="switch dropout off",
)
_ATTENTION = Patch("torch.nn.functional", "scaled_dot_product_attention", why="switch dropout off")
_POSITION = {"training": 2, "dropout_p": 4}
"""Of arguments that switch dropout off, where they are not named.

Source: torch/nn/functional.py, PyTorch 2.14.1.
"""


def switch_gradient_changes_off(hooks: InstalledHooks) -> None:
    """Have nothing clip or scale gradients."""
    hooks.wrap(_CLIPPING, "clip_grad_norm_", _norm)
    hooks.wrap(_CLIPPING, "clip_grad_value_", _nothing)
    hooks.wrap(_SCALER, "__init__", _disabled)


def switch_dropout_off(hooks: InstalledHooks) -> None:
    """Have PyTorch's dropouts, and that of attention, drop nothing."""
    for name in _DROPOUTS.names:
        hooks.wrap(_DROPOUTS, name, _without("training", value=False))
    hooks.wrap(_ATTENTION, "scaled_dot_product_attention", _without("dropout_p", value=0.0))


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
