"""Gradient accumulation: several micro-batches make one update.

    global batch  |-----------------------------|     one optimizer step
    micro-batches |---0---|---1---|---2---|--3--|     a forward and a backward each

Activations are those of one micro-batch; gradients live through all of them, which plain training does not
need if it clears them before the forward.
"""

from dataclasses import dataclass
from typing import Literal

from memfit.errors import UsageError

PartialWindow = Literal["flush", "carry", "drop"]
PARTIAL = ("flush", "carry", "drop")


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Settings; any two of the three numbers determine the third.

    Raises:
        UsageError: they contradict each other, or are no sizes.

    >>> Accumulation(micro_batch_size=8, global_batch_size=32).gradient_accumulation_steps
    4
    """

    gradient_accumulation_steps: int | None = None
    """Micro-batches to an optimizer step."""
    micro_batch_size: int | None = None
    """Samples of one forward."""
    global_batch_size: int | None = None
    """Samples of one optimizer step."""
    partial_window: PartialWindow = "flush"
    """What becomes of micro-batches at the end of the data that do not fill a window: an update of their own,
    divided by how many they are; the beginning of the next epoch's first window; or nothing."""
    gradient_dtype: str | None = None
    """What gradients are summed in. By default float32, where parameters are of lower precision and there is
    more than one micro-batch."""

    def __post_init__(self) -> None:
        """Fill in what follows from the rest."""
        for name in ("gradient_accumulation_steps", "micro_batch_size", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r} must be a whole number of at least 1.")
        if self.partial_window not in PARTIAL:
            raise UsageError(f"partial_window={self.partial_window!r} is none of {', '.join(PARTIAL)}.")
        steps, micro, whole = self.gradient_accumulation_steps, self.micro_batch_size, self.global_batch_size
        if micro and whole:
            if whole % micro or (steps and steps * micro != whole):
                raise UsageError(
                    f"global_batch_size={whole} is not micro_batch_size={micro}"
                    + (f" times gradient_accumulation_steps={steps}." if steps else " times a whole number.")
                )
            object.__setattr__(self, "gradient_accumulation_steps", whole // micro)
        elif steps and whole:
            if whole % steps:
                raise UsageError(
                    f"global_batch_size={whole} is not a multiple of gradient_accumulation_steps={steps}."
                )
            object.__setattr__(self, "micro_batch_size", whole // steps)
        elif steps and micro:
            object.__setattr__(self, "global_batch_size", steps * micro)
        elif whole:
            raise UsageError(
                "global_batch_size needs micro_batch_size or gradient_accumulation_steps beside it."
            )
