"""Gradient accumulation: several micro-batches make one update.

    global batch  |-----------------------------|     one optimizer step
    micro-batches |---0---|---1---|---2---|--3--|     a forward and a backward each

Activations exist for one micro-batch at a time. Gradients stay allocated through all forwards but the first;
plain training that clears them before its forward has none then.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.field_types import check_types
from memfit.units import format_bytes

PartialWindow = Literal["flush", "carry", "drop"]


@dataclass(frozen=True, slots=True)
class Accumulation:
    """Settings of gradient accumulation; any two of the three numbers determine the third.

    Raises:
        UsageError: they contradict each other, or are not positive.

    >>> Accumulation(micro_batch_size=8, global_batch_size=32).gradient_accumulation_steps
    4
    """

    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step."""
    micro_batch_size: int | None = None
    """Samples per forward."""
    global_batch_size: int | None = None
    """Samples per optimizer step."""
    partial_window: PartialWindow = "flush"
    """The last micro-batches of the data, if they do not fill a window: ``flush`` makes an update of them,
    divided by their number; ``carry`` starts the next epoch's first window with them; ``drop`` drops them."""
    gradient_dtype: str | None = None
    """The dtype in which gradients are summed. By default float32 for parameters of lower precision, if there
    is more than one micro-batch."""

    def __post_init__(self) -> None:
        """Check, and compute the third number from the other two."""
        check_types(self, "accumulation")
        for name in ("gradient_accumulation_steps", "micro_batch_size", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"'{name}' must be an integer of at least 1, not {value!r}.")
        _check_dtype(self.gradient_dtype)
        steps, micro, whole = self.gradient_accumulation_steps, self.micro_batch_size, self.global_batch_size
        if micro and whole:
            if whole % micro or (steps and steps * micro != whole):
                product = f"gradient_accumulation_steps={steps} times micro_batch_size={micro}"
                wanted = product if steps else f"a multiple of micro_batch_size={micro}"
                raise UsageError(f"global_batch_size must be {wanted}, not {whole}.")
            object.__setattr__(self, "gradient_accumulation_steps", whole // micro)
        elif steps and whole:
            if whole % steps:
                raise UsageError(
                    f"global_batch_size must be a multiple of gradient_accumulation_steps={steps}, not "
                    f"{whole}."
                )
            object.__setattr__(self, "micro_batch_size", whole // steps)
        elif steps and micro:
            object.__setattr__(self, "global_batch_size", steps * micro)
        elif whole:
            raise UsageError(
                f"global_batch_size={whole} alone does not determine how to divide a batch: set "
                "micro_batch_size or gradient_accumulation_steps too."
            )

    @property
    def several(self) -> bool:
        """Whether a window may have more than one micro-batch."""
        return (self.gradient_accumulation_steps or 1) > 1 or self.micro_batch_size is not None

    def notes(self, model: nn.Module) -> list[str]:
        """Return how many bytes of gradients stay allocated through all forwards of a window but the first.

        Plain training can clear gradients before its forward.
        """
        if not self.several:
            return []
        least = torch.float32.itemsize
        chosen: torch.dtype | None = getattr(torch, self.gradient_dtype) if self.gradient_dtype else None
        size = sum(
            parameter.numel() * (chosen.itemsize if chosen else max(parameter.dtype.itemsize, least))
            for parameter in model.parameters()
            if parameter.requires_grad
        )
        kept = f"{format_bytes(size)} of gradients stay allocated"
        return [f"accumulation: {kept} in every forward of a window but the first (exact)"]


def _check_dtype(name: str | None) -> None:
    dtype = getattr(torch, str(name), None)
    if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(
            f"gradient_dtype={name!r} is not a PyTorch floating-point dtype (for example 'float32')."
        )
