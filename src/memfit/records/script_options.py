"""What decides a script's memory and can be set from outside: its own options, its loader's batch size."""

from dataclasses import dataclass
from enum import StrEnum


class ScriptOptionPurpose(StrEnum):
    """What an option of a script sets."""

    BATCH_SIZE = "batch size"
    ACCUMULATION = "accumulation steps"
    PARTS = "parts of a batch"
    """Into which ``memfit.Engine`` divides each batch: of the loop that runs a ``memfit.Job``."""
    CHECKPOINTING = "checkpointing"
    LOW_PRECISION = "low precision"


@dataclass(frozen=True, slots=True)
class ScriptOption:
    """An option that the script's own parser accepted."""

    purpose: ScriptOptionPurpose
    words: tuple[str, ...]
    """What to write: ``--bf16``, or ``--mixed_precision bf16``; for a number, the option's name alone."""
    value: int
    """Its value in this run: a number; for a switch 1 if it is on, otherwise 0."""

    def with_value(self, number: int) -> tuple[str, ...]:
        """Return what to write for another number; a name that ends in ``=`` is one word with it.

        >>> ScriptOption(ScriptOptionPurpose.BATCH_SIZE, ("--batch-size",), 4).with_value(8)
        ('--batch-size', '8')
        """
        *before, last = self.words
        return (*before, f"{last}{number}") if last.endswith("=") else (*self.words, str(number))


@dataclass(frozen=True, slots=True)
class LoaderBatchSize:
    """The batch size of the ``DataLoader`` that the script last began to read."""

    size: int
    line: str
    """``file:line`` of the script that created the loader, or called the library that did."""
    library: str = ""
    """The library that created it, if the script itself did not."""
    samples: int | None = None
    """How many samples it has: no batch is larger. None if it does not know."""
