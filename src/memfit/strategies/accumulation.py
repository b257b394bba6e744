"""Gradient accumulation: several micro-batches make one update.

    parts_per_batch=4       batch |--0--|--1--|--2--|--3--|                 one update from each batch
    batches_per_update=4    batch 0, batch 1, batch 2, batch 3              one update from four batches

Each micro-batch has a forward and a backward of its own, so that activations exist for one at a time.
Gradients stay allocated through all forwards but the first; plain training that clears them before its
forward has none then.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from memfit.errors import UsageError
from memfit.strategies.mechanisms.split_batch import even_micro_batch_sizes
from memfit.strategies.setting_checks import check_dtype_name, check_setting_types
from memfit.units import format_bytes

Remainder = Literal["step", "carry", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """Settings of gradient accumulation: divide each batch, or gather several.

    Of the number of micro-batches and the two sizes, any two determine the third. Sizes alone divide batches.

    Raises:
        UsageError: the settings contradict each other, or a number is not positive.

    >>> Accumulation(micro_batch_size=8, global_batch_size=32).parts_per_batch
    4
    >>> Accumulation(batches_per_update=4, micro_batch_size=8).global_batch_size
    32
    """

    parts_per_batch: int | None = None
    """Micro-batches into which each batch is divided; each batch makes an update."""
    batches_per_update: int | None = None
    """Batches of the loader that make one update together; each is a micro-batch."""
    micro_batch_size: int | None = None
    """Samples per forward."""
    global_batch_size: int | None = None
    """Samples per update."""
    remainder: Remainder | None = None
    """With ``batches_per_update``: the last batches of an epoch, if they are fewer. ``step``, the default,
    makes an update of them, divided by their number; ``carry`` completes them with batches of the next epoch,
    and steps at the end of the last one; ``drop`` leaves them out."""
    gradient_dtype: str | None = None
    """The dtype in which gradients are summed. By default float32 for parameters of lower precision, if there
    is more than one micro-batch."""

    def __post_init__(self) -> None:
        """Check, and compute the third number from the other two."""
        check_setting_types(self, "accumulation")
        for name in ("parts_per_batch", "batches_per_update", "micro_batch_size", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"'{name}' must be an integer of at least 1, not {value!r}.")
        check_dtype_name(self.gradient_dtype, "gradient_dtype")
        self._check_mode()
        name = "batches_per_update" if self.gathers else "parts_per_batch"
        steps, micro, whole = getattr(self, name), self.micro_batch_size, self.global_batch_size
        if micro and whole:
            if whole % micro or (steps and steps * micro != whole):
                product = f"{name}={steps} times micro_batch_size={micro}"
                wanted = product if steps else f"a multiple of micro_batch_size={micro}"
                raise UsageError(f"global_batch_size must be {wanted}, not {whole}.")
            object.__setattr__(self, name, whole // micro)
        elif steps and whole:
            if whole % steps:
                raise UsageError(f"global_batch_size must be a multiple of {name}={steps}, not {whole}.")
            object.__setattr__(self, "micro_batch_size", whole // steps)
        elif steps and micro:
            object.__setattr__(self, "global_batch_size", steps * micro)
        elif whole:
            raise UsageError(
                f"global_batch_size={whole} alone does not determine how many micro-batches make an update: "
                "set micro_batch_size, parts_per_batch or batches_per_update too."
            )

    def _check_mode(self) -> None:
        if self.parts_per_batch is not None and self.gathers:
            raise UsageError(
                f"parts_per_batch={self.parts_per_batch} divides each batch, and batches_per_update="
                f"{self.batches_per_update} gathers batches: set one of the two."
            )
        if self.remainder is not None and not self.gathers:
            raise UsageError(
                f"remainder={self.remainder!r} needs batches_per_update: when batches are divided, each "
                "makes an update, and none remain."
            )

    @property
    def gathers(self) -> bool:
        """Whether the loader's batches are micro-batches, as opposed to being divided into them."""
        return self.batches_per_update is not None

    @property
    def steps(self) -> int:
        """Micro-batches of an update, if their number is set; 1 otherwise."""
        return self.batches_per_update or self.parts_per_batch or 1

    @property
    def several(self) -> bool:
        """Whether an update may have more than one micro-batch."""
        return self.steps > 1 or (self.micro_batch_size is not None and not self.gathers)

    def part_sizes(self, samples: int, finer: int = 1) -> list[int]:
        """Return the sizes of a batch's parts, ``finer`` times as many as the settings ask for.

        Raises:
            UsageError: the batch is empty.

        >>> Accumulation(micro_batch_size=4).part_sizes(10), Accumulation(parts_per_batch=2).part_sizes(10, 2)
        ([4, 4, 2], [3, 3, 2, 2])
        """
        if not samples:
            raise UsageError(
                "The batch has no samples. Do not pass it to engine.step. With several ranks, "
                "engine.through and engine.fit have a rank without batches take part in the updates."
            )
        if self.gathers:
            return even_micro_batch_sizes(samples, finer)
        if self.micro_batch_size is None:
            return even_micro_batch_sizes(samples, self.steps * finer)
        micro = max(1, self.micro_batch_size // finer)
        rest = samples % micro
        return [micro] * (samples // micro) + [rest] * (rest > 0)

    def expect_divided(self, method: str) -> None:
        """Raise an error if a method that takes whole batches is called, but batches are gathered."""
        if self.gathers and self.several:
            raise UsageError(
                f"{method} makes one update from each batch, but with batches_per_update="
                f"{self.batches_per_update} several make one. Use engine.fit or engine.windows, or divide "
                "batches with parts_per_batch."
            )

    def expect_gathered(self, method: str) -> None:
        """Raise an error if a method that takes micro-batches is called, but batches are divided."""
        if self.several and not self.gathers:
            raise UsageError(
                f"{method} takes each batch as one micro-batch, but the plan divides batches "
                "(parts_per_batch or micro_batch_size). Use engine.fit or engine.step, or gather batches "
                "with batches_per_update."
            )

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
