"""The part of the public JSON about the batches of a loader by size."""

import msgspec

from memfit.records import BatchSize, LongestBatch


class BatchSizeJson(msgspec.Struct, frozen=True):
    """The size of a batch, all its tensors together, and the shape of the tensor that differs."""

    bytes: int
    shape: tuple[int, ...]


class MeasuredBatchJson(msgspec.Struct, frozen=True):
    """What a training step with a batch allocated at most; without training, what a forward did."""

    batch: BatchSizeJson
    allocated: int


class LongestBatchJson(msgspec.Struct, frozen=True):
    """The batches of a loader by size, and what they need."""

    where: str
    """``file:line`` that created the loader."""
    seen: int
    of: int | None
    """Batches of the pass; null for a loader that does not know its length."""
    ended: str
    """``pass`` (all batches were seen), ``time``, ``gpu`` (the loader itself puts batches on the GPU: only
    one was seen), or the exception that ended the pass."""
    largest: BatchSizeJson
    median: BatchSizeJson
    measured: tuple[MeasuredBatchJson, ...]
    """Exact, the largest batch first; empty if none is larger than the median, or no step was complete."""
    fixed: int | None
    """Estimated: bytes allocated at the peak that do not depend on the batch. Null without two sizes."""
    per_byte: float | None
    """Estimated: bytes allocated at the peak for each byte of the batch."""
    off: int
    """Bytes by which what was measured is off the straight line of the two; 0 if only two were measured."""
    fits_bytes: int | None
    """Estimated: the largest batch that fits the device, by the line; null if it is not known."""
    fits_length: int | None
    """Estimated: the same as the length of the only dimension that differs; null if several do."""


def public_longest_batch(found: LongestBatch) -> LongestBatchJson:
    """Return the public form of what was found about a loader's batches."""
    scan = found.scan
    return LongestBatchJson(
        where=scan.where,
        seen=scan.seen,
        of=scan.of,
        ended=scan.ended,
        largest=_size(scan.largest),
        median=_size(scan.median),
        measured=tuple(MeasuredBatchJson(_size(each.batch), each.allocated) for each in found.measured),
        fixed=found.fixed,
        per_byte=found.per_byte,
        off=found.off,
        fits_bytes=found.fits_bytes,
        fits_length=found.fits_length,
    )


def _size(batch: BatchSize) -> BatchSizeJson:
    return BatchSizeJson(batch.bytes, batch.shape)
