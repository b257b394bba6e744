"""The longest batch in a summary: how many batches memfit saw, what the largest needs, and what would fit."""

from collections.abc import Iterator

from rich.text import Text

from memfit.records import BatchSize, DryRun, LoaderScan, PeakByBatchSize
from memfit.report.escape_control_characters import escaped
from memfit.report.places_in_words import short_path
from memfit.units import format_bytes

_NOTABLE = 0.02
"""Share of the largest peak from which on a distance from the line is worth a sentence."""

_FAR = 4
"""Times the largest batch beyond which no line through smaller ones says how much would fit."""


def longest_batch_lines(result: DryRun) -> Iterator[Text]:
    """Yield, for each loader that memfit looked through, what it saw and how the peak follows the size."""
    for found in result.longest:
        yield Text(f"Batches of {_loader(found.scan)}: {_sizes(found.scan)}{_seen(found.scan)}")
        if found.measured:
            peaks = [f"{format_bytes(each.allocated)} with {_size(each.batch)}" for each in found.measured]
            yield Text(f"  Most allocated: {', '.join(peaks)}.")
        if text := _estimate(found, ran_out=result.ran_out):
            yield Text(f"  {text}")


def _loader(scan: LoaderScan) -> str:
    return escaped(short_path(scan.where)) or "a loader of a library"


def _sizes(scan: LoaderScan) -> str:
    if scan.ended == "gpu":
        return "not looked through, because the loader itself puts them on the GPU."
    if not scan.served:
        return f"none is larger than the median, {_size(scan.median)}."
    times = f", {scan.largest.bytes / scan.median.bytes:,.1f} times the median" * bool(scan.median.bytes)
    return f"the largest is {_size(scan.largest)}{times} of {_size(scan.median)}."


def _size(batch: BatchSize) -> str:
    shape = " x ".join(f"{length:,}" for length in batch.shape)
    return f"{shape} ({format_bytes(batch.bytes)})" if shape else format_bytes(batch.bytes)


def _seen(scan: LoaderScan) -> str:
    if scan.ended == "gpu":
        return ""
    if scan.ended == "pass":
        return f" All {scan.seen:,} of the pass were seen."
    of = f"{scan.of:,}" if scan.of is not None else "an unknown number"
    if scan.ended == "time":
        return f" {scan.seen:,} of {of} were seen before the time was up; --scan SECONDS gives it more."
    return f" {scan.seen:,} of {of} were seen before the loader failed ({escaped(scan.ended)})."


def _estimate(found: PeakByBatchSize, *, ran_out: bool) -> str:
    """Return what the line through the measured peaks says; empty without one."""
    if found.per_byte is None:
        return ""
    if found.per_byte <= 0:
        return "The peak does not grow with the batch."
    scan = found.scan
    grows = f"{format_bytes(round(found.per_byte * 1000))} for every 1,000 bytes of the batch"
    fits = f"a batch of {format_bytes(found.fits_bytes)}" if found.fits_bytes is not None else ""
    at = scan.dimension
    if found.fits_length is not None and at is not None:
        lengths = scan.largest.shape[at] - scan.median.shape[at]
        each = found.per_byte * (scan.largest.bytes - scan.median.bytes) / lengths
        grows = f"{format_bytes(round(each))} for each unit of length"
        shape = [*scan.largest.shape[:at], found.fits_length, *scan.largest.shape[at + 1 :]]
        fits = " x ".join(f"{length:,}" for length in shape)
    text = f"Estimated from these: the peak grows by {grows}"
    if found.fits_bytes is None:
        text += "; no batch would fit."
    elif found.fits_bytes > _FAR * scan.largest.bytes:
        text += f"; even {_FAR} times the largest would fit."
    else:
        text += f"; up to about {fits} would fit{', if the allocator caches nothing' * (not ran_out)}."
    if found.off > _NOTABLE * max(each.allocated for each in found.measured):
        off = format_bytes(found.off)
        text += f" It does not grow in a straight line (up to {off} off): larger batches may need more."
    return text
