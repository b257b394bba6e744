"""How the peak follows the size of the batch: a straight line through what was measured.

peak │           ·    fixed + per_byte x bytes of the batch
     │       ·
     │   ·            a line, because activations grow with the batch and the model does not;
     └──────────────  attention that keeps its weights grows faster, which a third batch shows
       bytes of the batch
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from memfit.analysis.peak_outside_failed_attempts import events_outside_failed_attempts
from memfit.records import (
    DeviceUse,
    LoaderScan,
    Mark,
    MarkKind,
    MeasuredBatch,
    PeakByBatchSize,
    Timeline,
    Trace,
)

_BATCHES = 4
"""In the index of a mark: the served batches of a scan, and last the loader's own."""
_ENDS_FORWARD = (MarkKind.SERVED, MarkKind.BATCH, MarkKind.LOADER_END, MarkKind.SAVE, MarkKind.TRAINING_STEP)


@dataclass(frozen=True, slots=True)
class _Served:
    """The script was given a batch: which mark says so, and which of the served batches it was."""

    order: int
    choice: int


@dataclass(frozen=True, slots=True)
class _Use:
    """The events from ``begin`` up to ``end``, in which the script uses one of the served batches."""

    choice: int
    begin: int
    end: int
    is_first: bool = False
    """Whether it is the first training step, before which the optimizer has no state."""


def fit_peaks_to_batch_sizes(trace: Trace, line: Timeline) -> tuple[PeakByBatchSize, ...]:
    """Return what was measured for each loader that was looked through, and the line through it."""
    answered = np.where(events_outside_failed_attempts(trace, line), line.allocated, 0)
    served: list[list[_Served]] = [[] for _ in trace.scans]
    for order, mark in enumerate(trace.marks):
        number, choice = divmod(mark.index, _BATCHES)
        if mark.kind is MarkKind.SERVED and number < len(served):
            served[number].append(_Served(order, choice))
    found = (
        PeakByBatchSize(scan, _measured(scan, _uses(trace, scan, own), answered))
        for scan, own in zip(trace.scans, served, strict=True)
    )
    return tuple(
        with_largest_batch_within(_with_line(each), allocator_room_on_device(trace.device)) for each in found
    )


def _measured(
    scan: LoaderScan, uses: Iterable[_Use], allocated: npt.NDArray[np.int64]
) -> tuple[MeasuredBatch, ...]:
    """Return the peak with each served batch, the largest batch first; of later training steps if it has any.

    Args:
        scan: what the batches were chosen from.
        uses: when they were used.
        allocated: bytes after each event; 0 for those that the answer is not about.
    """
    peaks: dict[tuple[int, bool], int] = {}
    for use in uses:
        if use.begin < use.end:
            key = use.choice, use.is_first
            peaks[key] = max(peaks.get(key, 0), int(allocated[use.begin : use.end].max()))
    measured = [
        MeasuredBatch(batch, peak)
        for choice, batch in enumerate(scan.served)
        if (peak := peaks.get((choice, False), peaks.get((choice, True)))) is not None
    ]
    return tuple(sorted(measured, key=lambda each: -each.batch.bytes))


def allocator_room_on_device(device: DeviceUse) -> int:
    """Return the bytes that a device has for PyTorch's allocator."""
    return device.total.bytes - device.in_use - device.outside.bytes


def with_largest_batch_within(found: PeakByBatchSize, room: int) -> PeakByBatchSize:
    """Return the same with the largest batch by its line that allocates at most ``room`` bytes."""
    scan = found.scan
    if found.per_byte is None or found.fixed is None or found.per_byte <= 0 or room < found.fixed:
        return replace(found, fits_bytes=None, fits_length=None)
    fits = int((room - found.fixed) / found.per_byte)
    one, other, at = scan.largest, scan.median, scan.dimension
    length = None
    if at is not None and at < min(len(one.shape), len(other.shape)) and one.bytes != other.bytes:
        for_a_byte = (one.shape[at] - other.shape[at]) / (one.bytes - other.bytes)
        length = int(one.shape[at] + (fits - one.bytes) * for_a_byte)
    return replace(found, fits_bytes=fits, fits_length=length if length and length > 0 else None)


def _with_line(found: PeakByBatchSize) -> PeakByBatchSize:
    """Return the same with the straight line whose squared distances from the measured peaks are least."""
    size = np.array([each.batch.bytes for each in found.measured], np.float64)
    peak = np.array([each.allocated for each in found.measured], np.float64)
    if len(np.unique(size)) <= 1:
        return found
    from_mean = size - size.mean()
    slope = float(from_mean @ (peak - peak.mean()) / (from_mean @ from_mean))
    fixed = float(peak.mean() - slope * size.mean())
    off = np.abs(peak - (fixed + slope * size)).max() if len(size) > 2 else 0.0  # noqa: PLR2004 - two points
    return replace(found, fixed=round(fixed), per_byte=slope, off=round(float(off)))


def _uses(trace: Trace, scan: LoaderScan, served: Sequence[_Served]) -> Iterator[_Use]:
    """Yield when the script used the served batches: in training steps, or else in forwards."""
    if not served:
        return
    if scan.trains:
        yield from _steps(trace.marks, served, ahead=scan.ahead)
    elif not scan.ahead:
        ends = [order for order, mark in enumerate(trace.marks) if mark.kind in _ENDS_FORWARD]
        for each in served:
            after = bisect_right(ends, each.order)
            end = trace.marks[ends[after]].position if after < len(ends) else len(trace.events)
            yield _Use(each.choice, trace.marks[each.order].position, end)


def _steps(marks: Sequence[Mark], served: Sequence[_Served], *, ahead: bool) -> Iterator[_Use]:
    """Yield the training steps in which only one of the served batches was used.

    Args:
        marks: of the run.
        served: the batches given to the script, in order.
        ahead: whether a batch may be used in the step after the one in which the script asked for it.
    """
    ends = [order for order, mark in enumerate(marks) if mark.kind is MarkKind.TRAINING_STEP]
    orders = [each.order for each in served]
    for number in range(bisect_right(ends, orders[0]), len(ends)):
        after = ends[number - 1] if number else -1
        since = after if not ahead else ends[number - 2] if number > 1 else -1
        if orders[-1] <= since:
            break  # all of them are used
        first = bisect_right(orders, after)
        own = served[first : bisect_right(orders, ends[number])]
        before = [each for each in served[max(first - 1, 0) : first] if ahead and each.order > since]
        choices = {each.choice for each in (*before, *own)}
        if len(choices) != 1 or (ahead and _evaluates(marks[after + 1 : ends[number]])):
            continue
        begin = own[0].order if own and not ahead else after
        position = marks[begin].position if begin >= 0 else 0
        yield _Use(choices.pop(), position, marks[ends[number]].position, is_first=not number)


def _evaluates(marks: Sequence[Mark]) -> bool:
    return any(mark.kind is MarkKind.EVALUATION for mark in marks)
