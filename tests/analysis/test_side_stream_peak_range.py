"""The range between a run whose side streams finish early and one whose side streams finish late."""

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.side_stream_peak_range import with_side_stream_range
from memfit.records import Action, ByteRange, DeviceUse, Figure, Provenance
from support.traces import BASE, trace_of

MIB = 1 << 20
DEVICE = DeviceUse("A100-80GB", Figure(1 << 40, Provenance.EXACT), Figure(100 * MIB, Provenance.ASSUMED), 0)


def holding(allocated, reserved):
    """Return the summary of a run that holds so many MiB."""
    history = [(Action.SEGMENT_ALLOC, BASE, reserved * MIB), (Action.ALLOC, BASE, allocated * MIB)]
    return dry_run_of_trace(trace_of(history, device=DEVICE))


def mebibytes(size):
    return ByteRange(size.least // MIB, size.most // MIB)


def test_a_range_ends_at_what_late_work_needs():
    found = with_side_stream_range(holding(10, 20), holding(14, 30)).range
    assert mebibytes(found.allocated) == ByteRange(10, 14)
    assert mebibytes(found.reserved) == ByteRange(20, 30)
    assert mebibytes(found.process) == ByteRange(120, 130)


def test_a_figure_that_late_work_lowers_is_no_range_upside_down():
    found = with_side_stream_range(holding(10, 20), holding(9, 30)).range
    assert mebibytes(found.allocated) == ByteRange(9, 10)
    assert mebibytes(found.reserved) == ByteRange(20, 30)


def test_late_work_that_needs_no_more_leaves_the_early_answer():
    early = holding(10, 20)
    assert with_side_stream_range(early, holding(10, 20)) is early
    assert with_side_stream_range(early, holding(9, 20)) is early
