"""What a script needs in total, by a further run: with unlimited memory, or with tokens routed evenly."""

from dataclasses import replace

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.needed_memory import (
    memory_needed_without_convolution_workspaces,
    process_bytes_on_smallest_gpu,
)
from memfit.analysis.peak_by_batch_size import allocator_room_on_device, with_largest_batch_within
from memfit.analysis.peak_outside_failed_attempts import failed_allocation_events
from memfit.analysis.side_stream_peak_range import AT_ONCE, may_side_streams_change_peak
from memfit.analysis.trial_result import RunTrial, TrialResult
from memfit.devices import NO_LIMIT
from memfit.records import Change, DryRun, Note, Provenance, ScriptEnd, Trace
from memfit.termination_signals import INTERRUPTED
from memfit.units import format_bytes, format_gib

_EVEN = "routing=even"


def needs_unlimited_rerun(found: DryRun) -> bool:
    """Return whether only a run with unlimited memory tells what the script needs."""
    return found.ran_out and found.end.reason != "interrupted"


def run_with_unlimited_memory(run: RunTrial) -> TrialResult | ScriptEnd:
    """Run the script as written with unlimited memory; it fails if even that is too little for a request."""
    unlimited = run(Change(), "with unlimited memory")
    if isinstance(unlimited, TrialResult) and len(failed_allocation_events(unlimited.trace)):
        return ScriptEnd("refused", 1, f"the script ran out of memory even with {format_bytes(NO_LIMIT)}.")
    return unlimited


def find_total_need(found: DryRun, run: RunTrial) -> DryRun:
    """Find what a run that does not fit needs in total, by a rerun with unlimited memory.

    Returns:
        The summary with ``needs``, also without workspaces, and what the rerun measured of the longest
        batches, or with ``untried`` if the rerun did not complete; unchanged if it fits or the user
        interrupted it.
    """
    if not needs_unlimited_rerun(found):
        return found
    try:
        unlimited = run_with_unlimited_memory(run)
    except KeyboardInterrupt:
        return replace(found, untried=ScriptEnd("interrupted", INTERRUPTED))
    if not isinstance(unlimited, TrialResult):
        return replace(found, untried=unlimited)
    total = dry_run_of_trace(unlimited.trace)
    needs = process_bytes_on_smallest_gpu(
        unlimited.trace, total, found.device, fails_at=found.device.total.bytes
    )
    if may_side_streams_change_peak(unlimited.trace):
        needs = replace(needs, source=AT_ONCE)
    least = memory_needed_without_convolution_workspaces(
        unlimited.trace, total, found.device, needs, found.device.total.bytes
    )
    # What it reserves beyond what it allocates will be missing on this device, too.
    allocated = total.peak_allocated / max(needs.bytes - found.device.outside.bytes, 1)
    room = int(allocator_room_on_device(found.device) * min(allocated, 1.0))
    longest = tuple(with_largest_batch_within(each, room) for each in total.longest)
    return replace(
        found,
        needs=needs,
        needs_without_workspaces=least,
        bounds=total.bounds or found.bounds,
        longest=longest,
    )


def assumes_worst_token_routing(trace: Trace) -> bool:
    """Return whether a size assumes that all tokens of all ranks go to this rank's experts."""
    return any(note.bound == "routing" for note in trace.notes)


def even_routing_option(values: str) -> str:
    """Return the option ``--values`` for a run whose tokens are routed evenly.

    >>> even_routing_option("float=0.5"), even_routing_option("")
    ('float=0.5,routing=even', 'routing=even')
    """
    return ",".join(filter(None, (values, _EVEN)))


def with_even_routing_note(most: DryRun, run: RunTrial) -> DryRun:
    """Return a result with a note on what the run needs if tokens are routed evenly.

    Args:
        most: the result of the run in which this rank receives the most.
        run: runs the script with even routing and unlimited memory.
    """
    trial = run(Change(), "even routing")
    if not isinstance(trial, TrialResult):
        return most
    even = dry_run_of_trace(trial.trace)
    text = (
        f"If tokens are routed evenly (--values {_EVEN}), this rank needs "
        f"{format_gib(even.peak_process.bytes)}: {format_bytes(even.peak_allocated)} allocated, "
        f"{format_bytes(even.peak_reserved)} reserved."
    )
    return replace(most, notes=(*most.notes, Note(Provenance.ASSUMED, text, sizes=True)))
