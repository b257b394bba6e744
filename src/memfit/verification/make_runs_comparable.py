"""Make runs comparable: plain gradients, no dropout, and the CPU in place of CUDA.

Clipping and loss scaling act on what a batch sums up to, but a loop that knows no micro-batches does both
after each of them. Parts of a batch draw other numbers in dropout than the whole batch does. The CPU runs the
same operations, with its own kernels:

model.to("cuda")                     the CPU
torch.randn(2, device="cuda:0")      the CPU
torch.autocast("cuda")               that of the CPU
torch.cuda.is_available()            False, as it is
"""

import re
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memfit.patching.installed_hooks import InstalledHooks
from memfit.patching.patches import Patch

_CUDA = re.compile(r"cuda(:\d+)?")
_STAYS = {torch.Tensor.cuda, torch.Tensor.pin_memory}
_NOTHING_TO_DO = Patch(
    "torch.cuda",
    *("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats"),
    why="verify on the CPU, where there is nothing to do",
)
_DEVICE = Patch("torch.cuda", "current_device", why="verify on the CPU")
_AUTOCAST = Patch("torch.amp.autocast_mode:autocast", "__init__", why="verify on the CPU")


class CpuInsteadOfCuda(TorchFunctionMode):
    """Has PyTorch's functions use the CPU where they are passed a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function."""
        if func in _STAYS:
            return args[0]
        kwargs = kwargs or {}
        if func is torch.Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], "cpu", *args[2:])
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": "cpu"}
        return func(*map(_here, args), **{name: _here(value) for name, value in kwargs.items()})


def install_cpu_stand_in(hooks: InstalledHooks) -> None:
    """Have the script that this process runs use the CPU where it names a CUDA device."""
    CpuInsteadOfCuda().__enter__()  # type: ignore[no-untyped-call]  # until the process ends
    for name in _NOTHING_TO_DO.names:
        hooks.replace(_NOTHING_TO_DO, name, lambda _: lambda *_args, **_kwargs: None)
    hooks.replace(_DEVICE, "current_device", lambda _: lambda: 0)
    hooks.wrap(_AUTOCAST, "__init__", _autocast)


def _here(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if isinstance(value, str) and _CUDA.fullmatch(value) else value


def _autocast(
    original: Any, context: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any
) -> None:
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
    original(context, device_type, dtype, *args, **kwargs)


_CLIPPING = Patch(
    "torch.nn.utils.clip_grad",
    *("clip_grad_norm_", "clip_grad_value_"),
    also="torch.nn.utils",
    why="leave the gradients of a backward as they are",
)
_SCALER = Patch("torch.amp.grad_scaler:GradScaler", "__init__", why="leave losses unscaled")
_LOSS_SCALING = Patch("memfit.injection.scale_losses:LossScaling", "scales", why="leave losses unscaled")
_DROPOUTS = Patch(
    "torch.nn.functional",
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    why="switch dropout off",
)
_ATTENTION = Patch("torch.nn.functional", "scaled_dot_product_attention", why="switch dropout off")
_RECURRENT = Patch("torch.nn.modules.rnn:RNNBase", "__init__", why="switch dropout off")
_POSITION = {"training": 2, "dropout_p": 4, "dropout": 7}
"""Of arguments that switch dropout off, where they are not named.

Source: torch/nn/functional.py and torch/nn/modules/rnn.py, PyTorch 2.14.1.
"""


def switch_gradient_changes_off(hooks: InstalledHooks) -> None:
    """Have nothing clip or scale gradients."""
    hooks.wrap(_CLIPPING, "clip_grad_norm_", _norm)
    hooks.wrap(_CLIPPING, "clip_grad_value_", lambda *_args, **_named: None)
    hooks.wrap(_SCALER, "__init__", _disabled)
    hooks.wrap(_LOSS_SCALING, "scales", lambda *_: False)


def switch_dropout_off(hooks: InstalledHooks) -> None:
    """Have PyTorch's dropouts, and those of attention and recurrent layers, drop nothing."""
    for name in _DROPOUTS.names:
        hooks.wrap(_DROPOUTS, name, _without("training", value=False))
    hooks.wrap(_ATTENTION, "scaled_dot_product_attention", _without("dropout_p", value=0.0))
    hooks.wrap(_RECURRENT, "__init__", _without("dropout", value=0.0))


def _norm(original: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    return original(parameters, float("inf"), *args, **kwargs)


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
