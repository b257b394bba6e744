"""What a script feeds its model in a few steps, as digests of contents that it had on the CPU."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FedTensor:
    """A tensor that a script copied to the GPU, or passed to its model."""

    dtype: str
    shape: tuple[int, ...]
    rows: tuple[tuple[str, ...], ...]
    """For each of its first two dimensions: a digest of every row along it."""


@dataclass(frozen=True, slots=True)
class FedSamples:
    """What a script fed its model, in order."""

    copied: tuple[FedTensor, ...] = ()
    """Copied to the GPU since the script began, models apart."""
    passed: tuple[FedTensor, ...] = ()
    """Parts of such copies that the model was passed in the recorded step."""
    drawn: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """By pass over a loader that makes batches of samples: the indices of those in each batch."""
    computed: bool = False
    """Whether the model was passed, in the recorded step, what the GPU had computed."""
