"""The batches of a loader by size, and how the peak follows the size."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of one batch."""

    bytes: int
    """Of all tensors in it."""
    shape: tuple[int, ...]
    """Of the tensor that differs from batch to batch, the largest one if several do or none does; empty if
    it is not known."""


@dataclass(frozen=True, slots=True)
class LoaderScan:
    """What memfit saw when it drew batches from a loader, before the script did."""

    where: str
    """``file:line`` that created the loader; empty if no line of the script did."""
    seen: int
    """Batches drawn."""
    of: int | None
    """Batches of the pass; None for a loader that does not know its length."""
    ended: str
    """``pass`` (all were drawn), ``time`` (the time was up), ``gpu`` (the loader itself puts its batches on
    the GPU, so memfit drew one and no more), or the exception that ended the pass."""
    largest: BatchSize
    median: BatchSize
    served: tuple[BatchSize, ...]
    """The batches that the script was given first: the largest, one near the median, and one between the two
    if there is any. Empty if none is larger than the median."""
    dimension: int | None
    """The only dimension of ``shape`` that differs; None if several do, or none."""
    trains: bool = False
    """Whether the script ran a backward for one of these batches."""
    ahead: bool = False
    """Whether the script asks for a batch before it uses the one before."""


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """The peak of a training step (or of a forward, without one) with a batch of this size."""

    batch: BatchSize
    allocated: int
    """Most bytes allocated in it."""


@dataclass(frozen=True, slots=True)
class PeakByBatchSize:
    """How much memory the batches of a loader need, by their size."""

    scan: LoaderScan
    measured: tuple[MeasuredBatch, ...]
    """The largest first."""
    fixed: int | None = None
    """Bytes allocated at the peak that do not depend on the batch: where the straight line through
    ``measured`` begins. None without two different sizes. An estimate, as are the following."""
    per_byte: float | None = None
    """Bytes allocated at the peak for each byte of the batch: the slope of the line."""
    off: int = 0
    """By how many bytes the measured peaks are off the line, at most; 0 if there are only two."""
    fits_bytes: int | None = None
    """The largest batch that fits the device by that line, in bytes; None if no size matters or none fits."""
    fits_length: int | None = None
    """The same as a length of ``LoaderScan.dimension``; None without one."""
