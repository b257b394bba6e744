"""Mixed and low precision, and the loss scaling that fp16 needs.

autocast    parameters stay float32; autocast chooses each operation's precision
pure        the model itself is cast; with ``master_weights`` the optimizer updates float32 copies
"""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.mechanisms.wrap_forward import WrappedForward, wrap_forward
from memfit.strategies.precision_decorators import enable_fp16_decorators
from memfit.strategies.setting_checks import check_setting_types

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class LossScale:
    """The factor on the loss before backward, which keeps fp16 gradients from underflowing.

    Fields are those of ``torch.amp.GradScaler``. A static scale never changes, but steps whose gradients are
    not finite are skipped too.
    """

    mode: Literal["dynamic", "static"] = "dynamic"
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        """Check the values."""
        check_setting_types(self, "loss_scale")
        for name, holds, what in (
            ("init_scale", 0 < self.init_scale < math.inf, "finite and more than 0"),
            ("growth_factor", self.growth_factor >= 1, "at least 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "at least 1"),
        ):
            if not holds:
                raise UsageError(f"loss_scale: '{name}' must be {what}, not {getattr(self, name)!r}.")

    @property
    def is_static(self) -> bool:
        """Whether the scale never changes."""
        return self.mode == "static"

    def scaler_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``torch.amp.GradScaler``, which has no static scale: ``update`` sets it."""
        return {
            "init_scale": self.init_scale,
            "growth_factor": max(self.growth_factor, 1.0 + 1e-9),  # GradScaler takes no 1.0
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
        }

    @classmethod
    def of(cls, value: "LossScale | float | str | Mapping[str, Any]") -> "LossScale":
        """Read ``512.``, ``"dynamic"``, or ``dict(init_scale=512., mode="dynamic")``.

        Raises:
            UsageError: the value is something else.

        >>> LossScale.of(512.0).mode, LossScale.of("dynamic").mode
        ('static', 'dynamic')
        """
        if isinstance(value, LossScale):
            return value
        if value == "dynamic":
            return cls()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls("static", value)
        if isinstance(value, Mapping):
            known = {field.name for field in fields(cls)}
            if value.keys() <= known:
                return cls(**value)
            extra = sorted(map(str, value.keys() - known))
            raise UsageError(
                f"loss_scale has no field {', '.join(map(repr, extra))}. Its fields are "
                f"{', '.join(sorted(known))}."
            )
        raise UsageError(f"loss_scale must be a number, 'dynamic' or a dict, not {value!r}.")


@dataclass(frozen=True, slots=True)
class Precision:
    """Settings of mixed and low precision.

    Raises:
        UsageError: they contradict each other.
    """

    dtype: Dtype = "bf16"
    autocast: bool = True
    """Keep parameters in float32 and run operations under autocast; otherwise cast the model to ``dtype``."""
    loss_scale: LossScale | None = None
    """For fp16, ``"dynamic"`` by default; bf16 needs none."""
    master_weights: bool = False
    """Without autocast: the optimizer updates float32 copies of the parameters, which are rounded into the
    model. Only ``Engine`` keeps such copies."""

    def __post_init__(self) -> None:
        """Check, and fill in the loss scale."""
        scale = None if self.loss_scale is None else LossScale.of(self.loss_scale)
        object.__setattr__(self, "loss_scale", scale)
        check_setting_types(self, "precision")
        if self.dtype == "fp16":
            scale = scale or LossScale()
        elif scale is not None:
            raise UsageError(
                f"precision: loss_scale is for fp16 only; training in {self.dtype} needs none. Leave "
                "out loss_scale."
            )
        object.__setattr__(self, "loss_scale", scale)
        if self.master_weights and (self.autocast or self.dtype == "fp32"):
            raise UsageError(
                "precision: master_weights=True needs low-precision parameters (autocast=False "
                "with bf16 or fp16), but with these settings the parameters stay float32."
            )
        if self.dtype == "fp16" and not (self.autocast or self.master_weights):
            raise UsageError(
                "precision: pure fp16 parameters cannot be trained, because torch.amp.GradScaler does not "
                "unscale fp16 gradients. Use autocast=True, or master_weights=True."
            )

    @property
    def loop(self) -> str:
        """The setting that applies to the training loop and not to the model; empty if none does."""
        if self.master_weights:
            return "master_weights"
        # The default scale is that of the loop's own GradScaler.
        return "loss_scale" if self.loss_scale not in (None, LossScale()) else ""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as a ``torch.dtype``."""
        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return dtype

    def context(self, device: str) -> AbstractContextManager[Any]:
        """Return the context for a forward on a type of device."""
        if not self.autocast or self.dtype == "fp32":
            return nullcontext()
        return torch.autocast(device, dtype=self.torch_dtype)

    def apply(self, model: nn.Module) -> Callable[[], None]:
        """Cast a model, or run its forward under autocast; enable the precision decorators in it.

        Returns:
            The undo; parameters that were cast stay rounded.
        """
        with ExitStack() as undo:
            if self.dtype != "fp32":
                undo.callback(enable_fp16_decorators(model, self.torch_dtype, autocast=self.autocast))
            if self.autocast:
                undo.callback(wrap_forward(model, self, _AutocastForward))
            else:
                undo.callback(_cast(model, self.torch_dtype))
            return undo.pop_all().close


def autocast_of_model(precision: Precision | None, model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context for a model's forward and its loss in a precision, if there is one."""
    return nullcontext() if precision is None else precision.context(device_type_of_model(model))


def device_type_of_model(model: nn.Module) -> str:
    """Return the type of a model's device; the CPU's, if it has no parameters."""
    return next((parameter.device.type for parameter in model.parameters()), "cpu")


class _AutocastForward(WrappedForward):
    """Runs a forward in the context of a precision, on the device where the model is by then."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward, module = self.__wrapped__, self.module
        with self.around.context(device_type_of_model(module)):
            return forward(*args, **kwargs)


def _cast(model: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Cast floating-point parameters and buffers in place: they stay the same objects."""
    before = {
        tensor: tensor.dtype
        for tensor in chain(model.parameters(), model.buffers())
        if tensor.is_floating_point()
    }
    for tensor in before:
        tensor.data = tensor.data.to(dtype)

    def cast_back() -> None:
        for tensor, original in before.items():
            tensor.data = tensor.data.to(original)

    return cast_back
