"""Mixed and low precision, and the loss scaling that fp16 needs.

autocast    parameters stay float32; each operation runs in the precision that suits it
pure        the model itself is cast; with ``master_weights`` the optimizer updates float32 copies
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from memfit.errors import UsageError

Dtype = Literal["bf16", "fp16", "fp32"]
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class LossScale:
    """What the loss is multiplied by before backward, so that fp16 gradients do not vanish.

    Fields are those of ``torch.amp.GradScaler``; a static scale never changes, but steps whose gradients are
    not finite are skipped all the same.
    """

    mode: Literal["dynamic", "static"] = "dynamic"
    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        """Check each."""
        if self.mode not in ("dynamic", "static"):
            raise UsageError(f"loss_scale: mode={self.mode!r} is neither 'dynamic' nor 'static'.")
        for name, holds, what in (
            ("init_scale", self.init_scale > 0, "more than 0"),
            ("growth_factor", self.growth_factor >= 1, "at least 1"),
            ("backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1"),
            ("growth_interval", self.growth_interval >= 1, "at least 1"),
        ):
            if not holds:
                raise UsageError(f"loss_scale: {name}={getattr(self, name)!r} must be {what}.")

    @classmethod
    def of(cls, value: "LossScale | float | str | Mapping[str, Any]") -> "LossScale":
        """Read ``512.``, ``"dynamic"``, or ``dict(init_scale=512., mode="dynamic")``.

        Raises:
            UsageError: it is none of these.

        >>> LossScale.of(512.0).mode, LossScale.of("dynamic").mode
        ('static', 'dynamic')
        """
        if isinstance(value, LossScale):
            return value
        if value == "dynamic":
            return cls()
        if isinstance(value, int | float) and not isinstance(value, bool):
            return cls("static", float(value))
        if isinstance(value, Mapping):
            known = {field.name for field in fields(cls)}
            if value.keys() <= known:
                return cls(**value)
            raise UsageError(
                f"loss_scale has no {sorted(value.keys() - known)}; it has {', '.join(sorted(known))}."
            )
        raise UsageError(f"loss_scale={value!r} is neither a number, 'dynamic' nor a dict.")


@dataclass(frozen=True, slots=True)
class Precision:
    """Settings.

    Raises:
        UsageError: they do not go together.
    """

    dtype: Dtype = "bf16"
    autocast: bool = True
    """Parameters stay float32 and operations choose; otherwise the model itself is of ``dtype``."""
    loss_scale: LossScale | None = None
    """With fp16 under autocast ``"dynamic"`` by default; bf16 needs none."""

    def __post_init__(self) -> None:
        """Check, and fill in the loss scale."""
        if self.dtype not in DTYPES:
            raise UsageError(f"precision: dtype={self.dtype!r} is none of {', '.join(DTYPES)}.")
        scale = None if self.loss_scale is None else LossScale.of(self.loss_scale)
        if self.dtype == "fp16":
            scale = scale or LossScale()
        elif scale is not None:
            raise UsageError(f"precision: loss_scale is for fp16; {self.dtype} has float32's range.")
        object.__setattr__(self, "loss_scale", scale)
        if self.dtype == "fp16" and not self.autocast:
            raise UsageError(
                "precision: fp16 parameters cannot be trained by themselves: torch.amp.GradScaler does not "
                "unscale fp16 gradients. Use autocast."
            )
