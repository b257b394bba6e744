"""The range between a run with the workspaces that cuDNN suggests and one without."""

from dataclasses import replace

import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.needed_memory import (
    memory_needed_without_convolution_workspaces,
    with_needed_memory,
    with_range_by_workspaces,
)
from memfit.analysis.side_stream_peak_range import with_side_stream_range
from memfit.records import (
    Action,
    ByteRange,
    Category,
    DeviceUse,
    EventLabel,
    Figure,
    Phase,
    Provenance,
    RangeCause,
)
from memfit.report.terminal.verdict import verdict_of_run
from support.traces import BASE, Event, freed, trace_of

MIB = 1 << 20
CONTEXT = 100 * MIB
LABELS = (EventLabel(Phase.FORWARD, "features.3", "", -1), EventLabel(Phase.BACKWARD, "features.3", "", -1))


def device(total):
    return DeviceUse("A100-80GB", Figure(total, Provenance.EXACT), Figure(CONTEXT, Provenance.EXACT), 0)


def convolving(workspace, *, total=1 << 40, category=Category.WORKSPACE, reported=None):
    """Return a trace that holds 400 MiB, and for a moment as much workspace (bytes) as is asked for."""
    second = BASE + (1 << 32)
    history = [
        Event(Action.SEGMENT_ALLOC, BASE, 400 * MIB),
        Event(Action.ALLOC, BASE, 400 * MIB),
        Event(Action.SEGMENT_ALLOC, second, workspace),
        Event(Action.ALLOC, second, workspace, label=1, category=category),
        *freed(second, workspace),
    ]
    sizes = (workspace,) if reported is None else reported
    return trace_of(history, device=device(total), labels=LABELS, cudnn_workspaces=sizes)


def ranged(trace):
    return with_range_by_workspaces(trace, with_needed_memory(trace, dry_run_of_trace(trace)))


def test_the_lower_end_has_no_workspaces():
    found = ranged(convolving(200 * MIB)).range
    assert found.reserved == ByteRange(400 * MIB, 600 * MIB)
    assert found.allocated == ByteRange(400 * MIB, 600 * MIB)
    assert found.process == ByteRange(500 * MIB, 700 * MIB)
    assert found.causes == (RangeCause.WORKSPACES,)


def test_a_note_names_the_modules_with_the_largest_workspaces():
    note = ranged(convolving(200 * MIB)).notes[-1]
    assert "0.49 GiB to 0.68 GiB" in note.text
    assert "features.3 (backward): 200.0 MiB" in note.text
    assert note.provenance is Provenance.SIMULATED
    assert "if the script does not have them" in note.text  # it may train in channels_last already


def test_the_note_names_the_three_modules_with_the_largest_workspaces_that_were_allocated():
    modules, second = ("a", "b", "c", "d"), BASE + (1 << 32)
    sizes = [(0, 20), (1, 30), (2, 40), (3, 50), (3, 10)]
    history = [Event(Action.SEGMENT_ALLOC, BASE, 400 * MIB), Event(Action.ALLOC, BASE, 400 * MIB)]
    history += [Event(Action.SEGMENT_ALLOC, second, 50 * MIB)]
    for label, size in sizes:
        history.append(Event(Action.ALLOC, second, size * MIB, label=label, category=Category.WORKSPACE))
        history += freed(second, size * MIB)
    history.append(Event(Action.OOM, 60 * MIB, 700 * MIB, label=0, category=Category.WORKSPACE))
    labels = tuple(EventLabel(Phase.FORWARD, module, "", -1) for module in modules)
    reported = tuple(size * MIB for size in (10, 20, 30, 40, 50, 700))
    trace = trace_of(history, device=device(1 << 40), labels=labels, cudnn_workspaces=reported)
    note = ranged(trace).notes[-1]
    named = "The largest: d (forward): 50.0 MiB, c (forward): 40.0 MiB, b (forward): 30.0 MiB. "
    assert named in note.text
    assert note.sizes


def test_a_tight_run_has_a_range_too():
    assumed = replace(device(701 * MIB), context=Figure(CONTEXT, Provenance.ASSUMED))
    found = ranged(replace(convolving(200 * MIB), device=assumed))
    assert (found.verdict, found.range.process) == ("tight", ByteRange(500 * MIB, 700 * MIB))


@pytest.mark.parametrize(("workspace", "is_range"), [(12 * MIB, True), (10 * MIB, False)])
def test_ends_within_2_percent_of_the_process_are_one_figure(workspace, is_range):
    trace = convolving(workspace)
    found = dry_run_of_trace(trace)
    assert found.peak_process.bytes == CONTEXT + 400 * MIB + workspace
    assert (with_range_by_workspaces(trace, found) is not found) is is_range


def test_only_workspaces_of_cudnn_s_plans_are_left_out():
    assert ranged(convolving(200 * MIB, category=Category.TEMPORARY)).range is None
    assert ranged(convolving(200 * MIB, reported=())).range is None
    assert ranged(convolving(200 * MIB, reported=(7 * MIB,))).range is None


def test_the_verdict_is_that_of_the_upper_end():
    found = ranged(convolving(200 * MIB, total=701 * MIB))
    assert (found.verdict, found.range.process.most) == ("fits", 700 * MIB)
    without = ranged(trace_without_room())
    assert (without.verdict, without.range) == ("unknown", None)


@pytest.mark.parametrize(
    ("total", "in_use", "verdict"), [(650, 0, "tight"), (670, 0, "fits"), (675, 25, "tight")]
)
def test_the_verdict_is_that_of_the_run_without_workspaces_if_it_needs_more(total, in_use, verdict):
    # Blocks of 7 MiB are put where the workspace was; without it, a segment of 20 MiB has two of them.
    second, assumed = BASE + (1 << 32), Figure(CONTEXT, Provenance.ASSUMED)
    history = [
        Event(Action.SEGMENT_ALLOC, BASE, 400 * MIB),
        Event(Action.ALLOC, BASE, 400 * MIB),
        Event(Action.SEGMENT_ALLOC, second, 100 * MIB),
        Event(Action.ALLOC, second, 100 * MIB, label=1, category=Category.WORKSPACE),
        *freed(second, 100 * MIB),
        *(Event(Action.ALLOC, second + number * 7 * MIB, 7 * MIB) for number in range(14)),
    ]
    on = replace(device(total * MIB), context=assumed, in_use=in_use * MIB)
    trace = trace_of(history, device=on, labels=LABELS, cudnn_workspaces=(100 * MIB,))
    assert dry_run_of_trace(trace).verdict == "fits"
    found = ranged(trace)
    assert (found.verdict, found.range.process) == (verdict, ByteRange(600 * MIB, 640 * MIB))
    least, most = (f"{(mib + in_use) / 1024:.2f}" for mib in (600, 640))
    assert f"needs {least} to {most} GiB of" in verdict_of_run(found).text.plain


def test_a_workspace_that_found_no_memory_is_left_out_too():
    # Its failure released a cached segment of 300 MiB. Without it, the next tensor takes a part of that.
    addresses = [BASE + (i << 32) for i in range(4)]
    kept, cached, fallback, tensor = addresses
    history = [
        Event(Action.SEGMENT_ALLOC, kept, 400 * MIB),
        Event(Action.ALLOC, kept, 400 * MIB),
        Event(Action.SEGMENT_ALLOC, cached, 300 * MIB),
        Event(Action.ALLOC, cached, 300 * MIB),
        *freed(cached, 300 * MIB),
        Event(Action.SEGMENT_FREE, cached, 300 * MIB),
        Event(Action.OOM, 600 * MIB, 700 * MIB, label=1, category=Category.WORKSPACE),
        Event(Action.SEGMENT_ALLOC, fallback, 200 * MIB),
        Event(Action.ALLOC, fallback, 200 * MIB, label=1, category=Category.WORKSPACE),
        *freed(fallback, 200 * MIB),
        Event(Action.SEGMENT_ALLOC, tensor, 250 * MIB),
        Event(Action.ALLOC, tensor, 250 * MIB),
        Event(Action.ALLOC, fallback, 100 * MIB),
    ]
    on = device(1000 * MIB + CONTEXT)
    found = ranged(trace_of(history, device=on, labels=LABELS, cudnn_workspaces=(200 * MIB, 700 * MIB)))
    assert found.range.reserved == ByteRange(800 * MIB, 850 * MIB)


@pytest.mark.parametrize(("workspace", "least"), [(200 * MIB, 520 * MIB), (8 * MIB, None)])
def test_a_run_that_does_not_fit_needs_less_without_workspaces(workspace, least):
    # Without any, it needs 400 MiB and the context; but it failed on a GPU of 518 MiB.
    trace = convolving(workspace)
    needs = Figure(CONTEXT + 400 * MIB + workspace, Provenance.SIMULATED)
    found = memory_needed_without_convolution_workspaces(
        trace, dry_run_of_trace(trace), device(0), needs, 518 * MIB
    )
    assert (found and found.bytes) == least
    large = device(CONTEXT)
    bare = memory_needed_without_convolution_workspaces(
        convolving(200 * MIB), dry_run_of_trace(trace), large, Figure(700 * MIB, Provenance.EXACT)
    )
    assert bare.bytes == CONTEXT + 400 * MIB


@pytest.mark.parametrize(("workspace", "is_notable"), [(11 * MIB, True), (10 * MIB, False)])
def test_workspaces_of_at_most_2_percent_are_not_told_apart(workspace, is_notable):
    trace = convolving(workspace)
    needs = Figure(CONTEXT + 400 * MIB + workspace, Provenance.SIMULATED)
    found = memory_needed_without_convolution_workspaces(
        trace, dry_run_of_trace(trace), device(CONTEXT), needs
    )
    assert (found is not None) is is_notable


def test_a_run_without_convolutions_needs_nothing_else_without_workspaces():
    trace = convolving(200 * MIB, reported=())
    needs = Figure(700 * MIB, Provenance.EXACT)
    assert (
        memory_needed_without_convolution_workspaces(trace, dry_run_of_trace(trace), device(500 * MIB), needs)
        is None
    )


def trace_without_room():
    """Return the trace of a script that failed: its ends are not known."""
    trace = convolving(200 * MIB)
    return replace(trace, end=replace(trace.end, reason="exception"))


def test_a_range_of_streams_contains_that_of_workspaces():
    early, late = ranged(convolving(200 * MIB)), dry_run_of_trace(convolving(300 * MIB))
    found = with_side_stream_range(early, late).range
    assert found.reserved == ByteRange(400 * MIB, 700 * MIB)
    assert found.causes == (RangeCause.STREAMS, RangeCause.WORKSPACES)
