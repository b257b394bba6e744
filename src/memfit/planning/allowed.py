"""What a plan may change about a script."""

from dataclasses import dataclass

PRECISIONS: dict[str, dict[str, str | bool]] = {
    "amp": {"dtype": "bf16"},
    "bf16": {"dtype": "bf16", "autocast": False},
}
"""Other numerics that a plan may use, as settings of ``memfit.Precision``."""
LOW_BIT_STATE = "8bit"
"""Other numerics of the optimizer: its state in 8 bits."""


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
    optimizer: bool = True
    """When the optimizer updates parameters, and where its state waits: bit for bit the same."""
    low_bit_state: bool = False
    """How many bits the optimizer's state has."""
    slowdown: float = float("inf")
    """How many times as long as the script as written a step may take at most, predicted."""
