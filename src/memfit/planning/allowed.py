"""What a plan may change about a script."""

from dataclasses import dataclass

PRECISIONS: dict[str, dict[str, str | bool]] = {
    "amp": {"dtype": "bf16"},
    "bf16": {"dtype": "bf16", "autocast": False},
}
"""Other numerics that a plan may use, as settings of ``memfit.Precision``."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What a plan may change."""

    allocator: bool = True
    """``PYTORCH_ALLOC_CONF``."""
    rounding: bool = True
    """The order in which sums are taken: batches are divided, and optimizers fused. And the kernels of
    compiled code, which round at other places."""
    precisions: tuple[str, ...] = ()
    """Of ``PRECISIONS``: used if they lower the peak, and a plan with them fits."""
    slowdown: float = float("inf")
    """How many times as long as the script as written a step may take at most, predicted."""
