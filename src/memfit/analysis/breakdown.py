"""What holds the memory allocated at a moment, by category, module, line or op: rows that sum exactly.

requested by each row ──┐
rounding                ├──> allocated, as PyTorch counts it
before the history ─────┘

Two runs are compared by the rows at a moment of each.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import Numbers, attribute_allocations
from memfit.analysis.event_locations import (
    phase_of_events,
    script_location_at,
    steps_completed_at_events,
    steps_completed_before,
    worst_provenance_of_notes,
)
from memfit.analysis.fold_module_paths import fold_module_paths
from memfit.analysis.peak_outside_failed_attempts import peak_event_outside_failed_attempts
from memfit.analysis.run_stages import events_in_stage, stage_spans
from memfit.errors import UsageError
from memfit.records import (
    Attribution,
    Breakdown,
    BreakdownRow,
    Category,
    GroupBy,
    LiveAllocation,
    Phase,
    Provenance,
    RowChange,
    RunDifference,
    Stage,
    Timeline,
    Trace,
    worst_provenance,
)

CATEGORY_NAMES = {
    Category.PARAMETER: "parameters",
    Category.BUFFER: "buffers",
    Category.GRADIENT: "gradients",
    Category.OPTIMIZER_STATE: "optimizer state",
    Category.ACTIVATION: "activations",
    Category.RECOMPUTED: "recomputed activations",
    Category.INPUT: "inputs",
    Category.COPY: "EMA and weight copies",
    Category.HELD: "held by the script",
    Category.OUTPUT: "outputs",
    Category.TEMPORARY: "temporaries",
    Category.COMMUNICATION: "communication",
    Category.WORKSPACE: "workspaces",
    Category.UNKNOWN: "unknown",
}
ROUNDING, EARLIER = "rounding", "before the history"
LARGEST = 20
"""Number of allocations listed one by one."""
_HELD_BY_OBJECTS = {
    *(Category.PARAMETER, Category.BUFFER, Category.GRADIENT, Category.OPTIMIZER_STATE, Category.COPY)
}
_MOMENTS = ("peak", *Phase)
_STAGES = tuple(stage for stage in Stage if stage not in _MOMENTS)
_DIGITS = 10  # limit for a step's number: Python refuses to parse thousands


def peak_event(trace: Trace, line: Timeline, at: str) -> int:
    """Return the event after which most was allocated.

    Args:
        trace: what was recorded.
        line: its timeline.
        at: ``peak`` for the whole run, a phase (``backward``), a training step (``2``), or a stage of a whole
            run (``evaluation``).
    """
    allocated = line.allocated
    if not len(allocated):
        raise UsageError("This run allocated no memory, so there is nothing to explain.")
    if at == "peak":
        return peak_event_outside_failed_attempts(trace, line)
    if at.isdecimal() and len(at) < _DIGITS:
        within = steps_completed_at_events(trace, np.arange(len(allocated))) == int(at) - 1
        none = f"{steps_completed_before(trace, len(allocated))} training steps"
    elif at in _MOMENTS:
        within = phase_of_events(trace) == list(Phase).index(Phase(at))
        none = f"no {at} phase"
    elif at in _STAGES:
        within = events_in_stage(trace, Stage(at))
        stages = ", ".join(dict.fromkeys(span.stage for span in stage_spans(trace)))
        none = f"no {at}: " + (
            f"its stages are {stages}. Of a run that resumed, memfit keeps the trace only if it needs more"
            if stages
            else "only whole runs have stages (memfit dry-run --whole or --to-end)"
        )
    else:
        raise UsageError(
            f"--at {at} is not a moment of a run. Use one of {', '.join((*_MOMENTS, *_STAGES))}, or the "
            "number of a training step."
        )
    if not within.any():
        raise UsageError(f"--at {at}: this run has {none}.")
    return int(np.argmax(np.where(within, allocated, -1)))


def breakdown_at(
    trace: Trace, line: Timeline, attribution: Attribution, event: int, *, beside: Sequence[str] = ()
) -> Breakdown:
    """Return what holds the memory allocated just after an event.

    Args:
        trace: what was recorded.
        line: its timeline.
        attribution: of its allocations.
        event: index of the event.
        beside: modules of another run to compare rows with: repetition is folded over both runs.
    """
    alive = attribution.alive(event)
    requested = attribution.requested[alive]
    allocated = int(line.allocated[event])
    sure = category_provenance(trace)
    category = attribution.category[alive]
    rest = _rest(attribution, alive, allocated, sure)
    modules = fold_module_paths([*attribution.modules, *beside])[: len(attribution.modules)]
    names = {
        GroupBy.CATEGORY: (
            list(CATEGORY_NAMES.values()),
            np.array([list(CATEGORY_NAMES).index(one) for one in Category])[category],
        ),
        GroupBy.MODULE: (modules, attribution.module[alive]),
        GroupBy.LINE: (attribution.lines, attribution.line[alive]),
        GroupBy.OP: (attribution.ops, attribution.op[alive]),
    }
    by_name = {CATEGORY_NAMES[kind]: provenance for kind, provenance in sure.items()}
    unsure = worst_provenance(*sure.values())
    rows = {
        by: (*_rows(table, index, requested, by_name if by is GroupBy.CATEGORY else {}, unsure), *rest)
        for by, (table, index) in names.items()
    }
    largest = alive[np.argsort(-requested, kind="stable")[:LARGEST]]
    return Breakdown(
        event=event,
        place=script_location_at(trace, event),
        allocated=allocated,
        rows=rows,
        largest=tuple(describe_allocation(trace, attribution, int(index)) for index in largest),
    )


def describe_allocation(trace: Trace, attribution: Attribution, index: int) -> LiveAllocation:
    """Describe an allocation, by its position in an attribution."""
    event = int(attribution.born[index])
    tensor = int(attribution.tensor[index])
    what = trace.tensors[tensor] if tensor >= 0 else None
    return LiveAllocation(
        requested=int(attribution.requested[index]),
        block=int(attribution.block[index]),
        category=CATEGORY_NAMES[Category(attribution.category[index])],
        module=attribution.modules[attribution.module[index]],
        op=attribution.ops[attribution.op[index]],
        line=attribution.lines[attribution.line[index]],
        name=what.name if what is not None else "",
        dtype=what.dtype if what is not None else "",
        shape=what.shape if what is not None else None,
        born=script_location_at(trace, event),
    )


def category_provenance(trace: Trace) -> dict[Category, Provenance]:
    """Return the provenance of the bytes of each category.

    Live objects have sizes of their own. An assumed workspace size affects the workspaces, and the
    activations if a graph saved one; other assumed sizes affect all but the live objects; an assumed size of
    a live object affects every category.
    """
    unsure = [note for note in trace.notes if note.sizes]
    rest = worst_provenance_of_notes(note for note in unsure if not note.workspaces)
    if not AllocatorConfig.read(trace.settings).has_segments:
        return dict.fromkeys(CATEGORY_NAMES, rest)  # rows are what CUDA took, and its rounding is assumed
    objects = worst_provenance_of_notes(note for note in unsure if note.objects)
    workspaces = worst_provenance_of_notes(note for note in unsure if note.workspaces or note.objects)
    saved = worst_provenance(rest, worst_provenance_of_notes(note for note in unsure if note.activations))
    by_kind = {Category.WORKSPACE: workspaces, Category.ACTIVATION: saved}
    return {kind: objects if kind in _HELD_BY_OBJECTS else by_kind.get(kind, rest) for kind in CATEGORY_NAMES}


def _rows(
    table: Sequence[str],
    index: npt.NDArray[np.integer],
    requested: Numbers,
    sure: dict[str, Provenance],
    otherwise: Provenance,
) -> list[BreakdownRow]:
    bytes_of, blocks_of = np.zeros(len(table), np.int64), np.bincount(index, minlength=len(table))
    np.add.at(bytes_of, index, requested)
    sums: dict[str, list[int]] = {}
    for name, size, blocks in zip(table, bytes_of.tolist(), blocks_of.tolist(), strict=True):
        if blocks:
            row = sums.setdefault(name, [0, 0])
            row[0] += size
            row[1] += blocks
    rows = [
        BreakdownRow(name, size, blocks, sure.get(name, otherwise)) for name, (size, blocks) in sums.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)


def _split_named_rows(rows: Sequence[BreakdownRow]) -> tuple[Sequence[BreakdownRow], Sequence[BreakdownRow]]:
    """Split the named rows from the rest: rounding, and bytes from before the history."""
    rest = 2 if rows[-1].name == EARLIER else 1
    return rows[:-rest], rows[-rest:]


def _rest(
    attribution: Attribution, alive: Numbers, allocated: int, sure: dict[Category, Provenance]
) -> list[BreakdownRow]:
    requested, block = int(attribution.requested[alive].sum()), int(attribution.block[alive].sum())
    rows = [BreakdownRow(ROUNDING, block - requested, len(alive), worst_provenance(*sure.values()))]
    if allocated != block:
        rows.append(BreakdownRow(EARLIER, allocated - block, 0, Provenance.ASSUMED))
    return rows


def compare_run_breakdowns(
    before: Trace, after: Trace, at: str = "peak", by: GroupBy = GroupBy.CATEGORY
) -> RunDifference:
    """Compare two runs.

    Args:
        before: the first run.
        after: the second run.
        at: ``peak``, a phase (``backward``), or a training step (``2``): the moment of each run that holds
            most in it.
        by: how to group the bytes into rows.

    Raises:
        UsageError: a run has no such moment.
        FileFormatError: a history contradicts itself.
    """
    runs = (before, after)
    lines = [memory_timeline(run) for run in runs]
    attributions = [attribute_allocations(run, line) for run, line in zip(runs, lines, strict=True)]
    found = [
        breakdown_at(run, line, own, peak_event(run, line, at), beside=other.modules)
        for run, line, own, other in zip(runs, lines, attributions, reversed(attributions), strict=True)
    ]
    named, rest = zip(*(_split_named_rows(one.rows[by]) for one in found), strict=True)
    changed = [*_changed(*named), *_changed(*rest)]
    return RunDifference(
        at=at,
        by=by,
        places=(found[0].place, found[1].place),
        allocated=(found[0].allocated, found[1].allocated),
        reserved=(int(lines[0].reserved.max()), int(lines[1].reserved.max())),
        outside=(before.device.outside.bytes, after.device.outside.bytes),
        rows=tuple(sorted(changed, key=lambda row: -abs(row.after - row.before))),
        names=_names(before, after),
    )


def _names(before: Trace, after: Trace) -> tuple[str, str]:
    """Return what to call two runs: two ranks of a job of one size differ by their ranks, not by time."""
    one, other = before.rank, after.rank
    if one is None or other is None or one.rank == other.rank or one.world_size != other.world_size:
        return "before", "after"
    return f"rank {one.rank}", f"rank {other.rank}"


def _changed(before: Sequence[BreakdownRow], after: Sequence[BreakdownRow]) -> list[RowChange]:
    found = [{row.name: row.bytes for row in rows} for rows in (before, after)]
    names = dict.fromkeys([*found[0], *found[1]])
    return [RowChange(name, found[0].get(name, 0), found[1].get(name, 0)) for name in names]
