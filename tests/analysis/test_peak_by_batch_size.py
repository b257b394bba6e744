"""What each served batch needs, from the marks of handwritten traces, and the line through it."""

import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.peak_by_batch_size import with_largest_batch_within
from memfit.records import (
    Action,
    BatchSize,
    LoaderScan,
    Mark,
    MarkKind,
    MeasuredBatch,
)
from support.traces import BASE, Event, freed, trace_of

LARGEST, MEDIAN, BETWEEN = (BatchSize(length, (1, length)) for length in (400, 100, 200))


def trace_with(moments, **scan):
    """Return a trace: numbers are KiB that are allocated and freed, pairs are marks."""
    history, marks = [Event(Action.SEGMENT_ALLOC, BASE, 20 << 20)], []
    for moment in moments:
        if isinstance(moment, int):
            block = [Event(Action.ALLOC, BASE, moment << 10), *freed(BASE, moment << 10)]
            history += block
        else:
            marks.append(Mark(len(history), *moment))
    served = (LARGEST, MEDIAN, BETWEEN)
    fields = {"trains": True, "dimension": 1} | scan
    scanned = LoaderScan("train.py:3", 9, 9, "pass", LARGEST, MEDIAN, served, **fields)
    return trace_of(history, marks=tuple(marks), scans=(scanned,))


def give(choice, scan=0):
    return MarkKind.SERVED, 4 * scan + choice


def step(number):
    return MarkKind.TRAINING_STEP, number


EVALUATION = (MarkKind.EVALUATION, 0)


def peaks(trace):
    (found,) = dry_run_of_trace(trace).longest
    return {each.batch.bytes: each.allocated >> 10 for each in found.measured}


def test_each_batch_has_the_peak_of_its_step_and_the_first_step_does_not_count():
    moments = [give(0), 990, step(0), give(0), 840, step(1), give(1), 240, step(2), give(2), 440, step(3)]
    assert peaks(trace_with([*moments, give(3), 999, step(4)])) == {400: 840, 200: 440, 100: 240}


def test_a_run_of_one_step_has_the_peak_of_the_first():
    assert peaks(trace_with([give(0), 990, step(0)])) == {400: 990}


def test_a_step_without_an_end_is_not_measured():
    assert peaks(trace_with([give(0), 300, step(0), give(0), 840])) == {400: 300}


def test_an_evaluation_before_a_step_does_not_count():
    moments = [give(0), 800, step(0), give(0), 840, step(1), EVALUATION, 999, give(1), 240, step(2)]
    assert peaks(trace_with(moments)) == {400: 840, 100: 240}


def test_where_batches_are_asked_for_ahead_only_steps_with_one_size_count():
    asked = [give(0), give(0), 800, step(0), give(0), 840, step(1), give(1), 850, step(2)]
    used = [give(1), 240, step(3), give(2), 250, step(4), give(2), 440, step(5), give(3), 999, step(6)]
    used += [999, step(7), 999, step(8)]
    evaluated = [*asked, give(1), EVALUATION, 999, step(3)]
    assert peaks(trace_with([*asked, *used], ahead=True)) == {400: 840, 100: 240, 200: 440}
    assert peaks(trace_with(evaluated, ahead=True)) == {400: 840}


def test_without_a_backward_a_batch_has_what_follows_it():
    moments = [give(0), 400, give(1), 100, (MarkKind.BATCH, 0), give(2), 200, (MarkKind.LOADER_END, 0), 900]
    assert peaks(trace_with(moments, trains=False)) == {400: 400, 100: 100, 200: 200}
    assert peaks(trace_with(moments, trains=False, ahead=True)) == {}


def test_marks_of_no_scan_and_of_no_batch_are_ignored():
    moments = [give(0, scan=7), 990, step(0), give(0), 300, step(1)]
    assert peaks(trace_with(moments)) == {400: 300}
    assert dry_run_of_trace(trace_with(moments, trains=False)).longest[0].measured == (
        MeasuredBatch(LARGEST, 300 << 10),
    )


@pytest.mark.parametrize("between", [440, 500])
def test_the_line_through_the_peaks_says_what_fits(between):
    moments = [give(0), 9, step(0), give(0), 840, step(1), give(1), 240, step(2), give(2), between, step(3)]
    (found,) = dry_run_of_trace(trace_with(moments)).longest
    if between == 440:
        assert (found.fixed, found.per_byte, found.off) == (40 << 10, pytest.approx(2048), 0)
    else:
        assert 0 < found.off >> 10 < 60
        return
    assert (
        with_largest_batch_within(found, 1640 << 10).fits_bytes
        == with_largest_batch_within(found, 1640 << 10).fits_length
        == 800
    )
    assert with_largest_batch_within(found, 39 << 10).fits_bytes is None
