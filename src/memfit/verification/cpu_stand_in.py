"""Run code that names CUDA devices on the CPU: the same operations, with the CPU's kernels.

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
