"""From a trace to the answer of a dry run: the peak, what holds it, where, and whether it grows."""

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from memfit.allocator.block_and_segment_sizes import device_bytes_for_request
from memfit.allocator.config import AllocatorConfig
from memfit.allocator.reconstruct_initial_state import reconstruct_initial_state
from memfit.allocator.timeline import memory_timeline, timeline_disagreement_with_pytorch
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import CATEGORY_NAMES, ROUNDING, breakdown_at, category_provenance
from memfit.analysis.data_dependent_size_bounds import data_dependent_size_bounds
from memfit.analysis.event_locations import (
    script_line_of_event,
    script_location_at,
    step_end_events,
    steps_completed_before,
    worst_provenance_of_notes,
)
from memfit.analysis.peak_by_batch_size import fit_peaks_to_batch_sizes
from memfit.analysis.peak_outside_failed_attempts import (
    caught_failure_events,
    event_of_highest_level,
    events_outside_failed_attempts,
    failed_allocation_events,
    peak_event_outside_failed_attempts,
)
from memfit.analysis.run_stages import memory_use_by_stage, stage_of_event
from memfit.analysis.trial_result import ran_to_completion
from memfit.records import (
    DEFAULT_POOL,
    Action,
    Attribution,
    Category,
    DeviceUse,
    DryRun,
    Figure,
    GroupBy,
    Growth,
    MachineKind,
    MarkKind,
    Note,
    OutOfMemory,
    Provenance,
    ScriptLocation,
    Term,
    Timeline,
    Trace,
    worst_provenance,
)
from memfit.timing.step_time import step_time_of_trace, why_step_time_is_unknown
from memfit.units import format_bytes

_NOTABLE = 0.01
"""Share of the allocated bytes from which on a note names the line of what the script holds."""


def dry_run_of_trace(trace: Trace) -> DryRun:
    """Return what a script uses, from its trace alone.

    Returns:
        The verdict, the peaks in bytes, the terms that sum to them, and notes.
    """
    line = memory_timeline(trace)
    return dry_run_of_attributed_trace(trace, line, attribute_allocations(trace, line))


def dry_run_of_attributed_trace(trace: Trace, line: Timeline, attribution: Attribution) -> DryRun:
    """Return the summary of a trace whose timeline and attribution exist already."""
    steps = steps_completed_before(trace, len(trace.events))
    peak = peak_event_outside_failed_attempts(trace, line)
    allocated = int(line.allocated[peak]) if len(line.allocated) else 0
    reserved = _reserved(trace, line)
    context = trace.device.context
    failed = _out_of_memory(trace, line)
    # Sums over the allocator's history are exact, unless a requested size was itself assumed.
    sure = worst_provenance_of_notes(note for note in trace.notes if note.sizes)
    outside = trace.device.outside
    what = "CUDA context" if trace.device.nccl is None else outside.source
    process = Figure(
        reserved + outside.bytes, worst_provenance(sure, outside.provenance), f"reserved + {what}"
    )
    # A script that recovered has had PyTorch release its cache, and its attempts have filled the cache again.
    needed = allocated + outside.bytes if len(caught_failure_events(trace)) else process.bytes
    bounds = data_dependent_size_bounds(trace, line, _deciding_event(trace, line, peak))
    step_time = step_time_of_trace(trace)
    has_no_time = step_time is None and trace.device.machine is MachineKind.GHOST
    return DryRun(
        verdict=_verdict(trace, failed, needed, is_bound=bool(bounds)),
        device=trace.device,
        steps=steps,
        peak_allocated=allocated,
        peak_reserved=reserved,
        peak_process=process,
        peak_place=_placed(trace, peak),
        terms=(
            *_by_category(trace, line, attribution, peak, sure),
            Term("allocated", Figure(allocated, sure)),
            Term("cached, not allocated", Figure(reserved - allocated, sure)),
            Term("reserved", Figure(reserved, sure)),
            Term("CUDA context", context),
            *([Term("NCCL", trace.device.nccl)] if trace.device.nccl is not None else ()),
            Term("process", process),
        ),
        out_of_memory=failed,
        growth=_growth(trace, line),
        end=trace.end,
        notes=(*trace.notes, *_notes(trace, line, steps), *_held_by_script(attribution, peak, allocated)),
        versions=trace.versions,
        command=trace.command,
        uncertainty=_uncertainty(trace.device),
        caught=len(caught_failure_events(trace)),
        children=trace.children,
        bounds=bounds,
        rank=trace.rank,
        pinned=_pinned(trace),
        unpinned=Figure(trace.unpinned, Provenance.EXACT, _AFTER_STEPS) if trace.unpinned else None,
        stages=memory_use_by_stage(
            trace, line, None if len(caught_failure_events(trace)) else _reported_failure(trace)
        ),
        shortened=trace.shortened,
        longest=fit_peaks_to_batch_sizes(trace, line),
        step_time=step_time,
        step_time_unknown=why_step_time_is_unknown(trace) if has_no_time else "",
    )


_AFTER_STEPS = "what optimizers hold after their first steps"


def _pinned(trace: Trace) -> Figure | None:
    """Return the pinned host memory: on a card, copies that take longer may need more blocks."""
    if not trace.pinned:
        return None
    if trace.device.machine is MachineKind.CARD:
        return Figure(trace.pinned, Provenance.MEASURED, "torch.cuda.host_memory_stats")
    return Figure(trace.pinned, Provenance.ASSUMED, "if copies are done when the next block is needed")


def _reserved(trace: Trace, line: Timeline) -> int:
    """Return the peak of reserved bytes; for CUDA's own pool, from PyTorch's counter."""
    own = int(line.reserved[events_outside_failed_attempts(trace, line)].max(initial=0))
    if AllocatorConfig.read(trace.settings).has_segments:
        return own
    return max(own, trace.statistics.get("reserved_bytes.all.peak", 0))


def _deciding_event(trace: Trace, line: Timeline, peak: int) -> int:
    """Return the event that decides the answer: the failure, or the later peak of allocated and reserved."""
    failures = failed_allocation_events(trace)
    if len(failures) and not len(caught_failure_events(trace)):
        return int(failures[-1])
    return max(peak, event_of_highest_level(line.reserved, events_outside_failed_attempts(trace, line)))


def _uncertainty(device: DeviceUse) -> int:
    """Return by how many bytes the context may exceed its figure."""
    is_assumed = device.context.provenance is Provenance.ASSUMED
    return round(device.context_spread * device.context.bytes) if is_assumed else 0


def _verdict(trace: Trace, failed: OutOfMemory | None, needed: int, *, is_bound: bool) -> str:
    if trace.end.reason == "out of memory":
        return "may not fit" if is_bound else "out of memory"
    if failed is not None and not len(caught_failure_events(trace)):
        return "may not fit" if is_bound else "does not fit"
    device = trace.device
    if not ran_to_completion(trace.end) or trace.children or not device.total.bytes:
        return "unknown"
    left = device.total.bytes - device.in_use - needed
    if left < 0 and device.nccl is not None:  # NCCL asked last, and not PyTorch
        return "does not fit"
    return "tight" if left < _uncertainty(device) else "fits"


def _by_category(
    trace: Trace, line: Timeline, attribution: Attribution, peak: int, sure: Provenance
) -> list[Term]:
    """Split the bytes allocated at an event by category, with rounding as a term of its own."""
    names = [*CATEGORY_NAMES.values(), ROUNDING]
    if not len(trace.events):
        return [Term(name, Figure(0, sure)) for name in names]
    rows = breakdown_at(trace, line, attribution, peak).rows[GroupBy.CATEGORY]
    found = {row.name: Figure(row.bytes, row.provenance) for row in rows}
    unsure = {
        CATEGORY_NAMES[category]: provenance for category, provenance in category_provenance(trace).items()
    }
    none = {name: Figure(0, unsure.get(name, sure)) for name in names}
    return [Term(name, figure) for name, figure in (none | found).items()]


def _placed(trace: Trace, event: int) -> ScriptLocation:
    return replace(script_location_at(trace, event), stage=stage_of_event(trace, event))


def _reported_failure(trace: Trace) -> int | None:
    """Return the failed allocation to report: the one that ended the script, or the first if it continued."""
    failures = failed_allocation_events(trace)
    if not len(failures):
        return None
    return int(failures[-1] if trace.end.reason == "out of memory" else failures[0])


def _out_of_memory(trace: Trace, line: Timeline) -> OutOfMemory | None:
    event = _reported_failure(trace)
    if event is None:
        return None
    requested = int(trace.events.size[event])
    free = int(trace.events.address[event])
    config = AllocatorConfig.read(trace.settings)
    place = _placed(trace, event)
    return OutOfMemory(
        replace(place, line=place.line or trace.end.where),
        requested,
        free,
        max(0, device_bytes_for_request(requested, config) - free),
        int(line.reserved[event] - line.allocated[event]),
    )


def _growth(trace: Trace, line: Timeline) -> Growth:
    """Compare the requested bytes that are still held at the end of each step.

    Requested, not allocated: the same tensors can get blocks of different sizes from step to step. Age
    separates a leak from variation: bytes that have outlived a whole step should stay the same, while a
    step's own tensors may be of any size (batches of varying length). The pool of a CUDA graph is permanent
    from its capture on, so it does not count. Steps by hand end at the next backward pass, after the next
    forward; not so the last one of a script that ended.
    """
    ends = step_end_events(trace)
    kinds = {mark.kind for mark in trace.marks}
    if MarkKind.BACKWARD in kinds and MarkKind.OPTIMIZER_STEP not in kinds and trace.end.reason == "end":
        ends = ends[:-1]
    if len(ends) <= 1 or Action.EARLIER in trace.events.action:  # frees of older allocations are unknown
        return Growth(None, 0, "", leak=False)
    held, own = _held(trace, line, ends)
    outlived = [after - new for after, new in zip(held[1:], own[1:], strict=True)]
    more = held[-1] > held[-2]  # otherwise the older bytes came once, late
    if more and len(outlived) > 1 and (leaked := outlived[-1] - outlived[-2]) > 0:
        return Growth(None, leaked, _growing_line(trace, line, ends[-3:]), leak=True)
    steady = len(held) - 1
    while steady > 0 and held[steady - 1] == held[-1]:
        steady -= 1
    if steady == len(held) - 1:
        return Growth(None, held[-1] - held[-2], "", leak=False)
    return Growth(steady + 1, 0, "", leak=False)


def _held(trace: Trace, line: Timeline, ends: list[int]) -> tuple[list[int], list[int]]:
    """Return the requested bytes held at the end of each step, and how many of them that step allocated."""
    born = np.flatnonzero(trace.events.action == Action.ALLOC)
    born = born[~_captured(trace, born)]
    freed, size = line.freed_by[born], trace.events.size[born]
    change = np.zeros(len(trace.events) + 1, np.int64)
    np.add.at(change, born, size)
    np.subtract.at(change, freed, size)
    level = np.concatenate((np.zeros(1, np.int64), np.cumsum(change)))
    step = np.searchsorted(ends, born, side="right")
    own = np.zeros(len(ends) + 1, np.int64)
    np.add.at(own, step, np.where(freed >= np.append(ends, np.iinfo(np.int64).max)[step], size, 0))
    return level[ends].tolist(), own[: len(ends)].tolist()


def _captured(trace: Trace, events: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which allocations are in private pools of CUDA graphs that exist at the end."""
    pools = sorted((s.address, s.address + s.size) for s in trace.segments if s.pool != DEFAULT_POOL)
    starts, stops = np.array(pools, np.uint64).reshape(-1, 2).T
    address = trace.events.address[events]
    segment = np.searchsorted(starts, address, side="right")  # counts those that begin at it or before
    return (segment > 0) & (address < np.append(stops, 0)[segment - 1])


def _alive(trace: Trace, line: Timeline, position: int) -> npt.NDArray[np.int64]:
    """Return the allocations alive just before an event."""
    before = trace.events.action[:position] == Action.ALLOC
    return np.flatnonzero(before & (line.freed_by[:position] >= position))


def _growing_line(trace: Trace, line: Timeline, ends: list[int]) -> str:
    """Return the line that holds more old bytes after the last of three steps than after the second."""
    first, second, third = ends
    held: Counter[str] = Counter()
    for moment, born_before, sign in ((second, first, -1), (third, second, 1)):
        for event in _alive(trace, line, moment).tolist():
            if event < born_before:
                held[script_line_of_event(trace, event)] += sign * int(trace.events.size[event])
    return max(held, key=lambda where: held[where], default="")


def _held_by_script(attribution: Attribution, peak: int, allocated: int) -> list[Note]:
    """Name the line that allocated most of what the script holds at the peak, unless that is little."""
    alive = attribution.alive(peak)
    held = alive[attribution.category[alive] == Category.HELD]
    size = int(attribution.requested[held].sum())
    if size < _NOTABLE * max(allocated, 1):
        return []
    by_line = np.bincount(attribution.line[held], weights=attribution.requested[held])
    most = int(np.argmax(by_line))
    by_that = format_bytes(int(by_line[most]))
    text = f"This line allocated {by_that} of the {format_bytes(size)} that the script holds."
    return [Note(Provenance.EXACT, text, attribution.lines[most])] if attribution.lines[most] else []


def _notes(trace: Trace, line: Timeline, steps: int) -> list[Note]:
    notes, events = [], trace.events
    if not steps and trace.end.reason == "end" and not trace.end.missing_updates:
        backwards = sum(mark.kind is MarkKind.BACKWARD for mark in trace.marks)
        did = f"{backwards} backward passes" if backwards else "forward passes only"
        covered = "up to where it ended" if trace.end.gave_up or trace.end.stand_ins else "its whole run"
        text = f"The script completed no training step ({did}); the figures cover {covered}."
        notes.append(Note(Provenance.EXACT, text, sizes=True))
    before = reconstruct_initial_state(trace, AllocatorConfig.read(trace.settings))
    if before.reserved:
        text = f"The allocator history begins with {before.reserved:,} bytes already reserved"
        short = (
            f"; allocated figures may be too low by up to {before.uncertain:,} bytes, reserved figures are "
            "exact."
        )
        sure = Provenance.ASSUMED if before.uncertain else Provenance.EXACT
        notes.append(Note(sure, text + (short if before.uncertain else "."), sizes=bool(before.uncertain)))
    # Without a cache PyTorch counts nothing, so there is nothing to compare.
    counted = AllocatorConfig.read(trace.settings).caching
    if counted and (differs := timeline_disagreement_with_pytorch(trace, line)):
        text = f"{differs} The figures may be off by the difference."
        notes.append(Note(Provenance.ASSUMED, text, sizes=True))
    if failed := np.count_nonzero(events.action[events.category == Category.WORKSPACE] == Action.OOM):
        text = (
            f"{failed:,} of the workspaces that cuDNN suggested did not fit. PyTorch chose other algorithms, "
            "which need less memory and may be slower."
        )
        notes.append(Note(Provenance.SIMULATED, text))
    return notes
