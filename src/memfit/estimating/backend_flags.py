"""PyTorch's global switches that select kernels, and so affect memory."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

_cuda, _cudnn = torch.backends.cuda, torch.backends.cudnn
_SWITCHES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "flash attention": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "efficient attention": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "math attention": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    "cuDNN attention": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "cuDNN": (lambda: _cudnn.enabled, lambda value: setattr(_cudnn, "enabled", value)),
    "cuDNN benchmark": (lambda: _cudnn.benchmark, lambda value: setattr(_cudnn, "benchmark", value)),
    "cuDNN determinism": (
        lambda: _cudnn.deterministic,
        lambda value: setattr(_cudnn, "deterministic", value),
    ),
    "autocast dtype": (
        lambda: torch.get_autocast_dtype("cuda"),
        lambda value: torch.set_autocast_dtype("cuda", value),
    ),
    "autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
}
"""Name -> functions that read and set the switch."""


def flags() -> dict[str, Any]:
    """Return the values of the switches in this process."""
    return {name: read() for name, (read, _) in _SWITCHES.items()}


def set_flags(values: Mapping[str, Any]) -> None:
    """Set the switches to values that ``flags`` returned in another process; equal ones are left alone."""
    for name, value in values.items():
        read, write = _SWITCHES[name]
        if read() != value:
            write(value)
