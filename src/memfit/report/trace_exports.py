"""Export a run for other tools: a Chrome trace, which Perfetto reads as well, and a table of all allocations.

Names come from the trace. JSON escapes them; in the table, a cell that a spreadsheet would read as a formula
gets a leading apostrophe.
"""

import csv
import io
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.analysis.event_locations import training_step_of_event
from memfit.analysis.explanation import allocated_by_category_and_event
from memfit.records import Action, Attribution, Category, MarkKind, Phase, Timeline, Trace
from memfit.report.escape_control_characters import escaped

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_PHASES = tuple(Phase)
COLUMNS = (
    *("born", "freed", "requested", "block", "category", "step", "phase", "module", "op", "name", "dtype"),
    *("shape", "line"),
)
"""Columns of the table. ``born`` and ``freed`` are events of the trace; ``freed`` may be empty."""


def chrome_trace_of_run(trace: Trace, line: Timeline, attribution: Attribution) -> bytes:
    """Return the timeline in the Trace Event Format: counters of bytes, phases and training steps.

    Source: "Trace Event Format", Google, events ``C``, ``X`` and ``i``; times are microseconds.
    """
    return json.dumps(
        {"traceEvents": list(_trace_events(trace, line, attribution)), "displayTimeUnit": "ms"},
        separators=(",", ":"),
    ).encode("ascii")


def _trace_events(trace: Trace, line: Timeline, attribution: Attribution) -> Iterator[dict[str, Any]]:
    times = _times(trace)
    yield {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": " ".join(trace.command) or "memfit"}}
    levels = allocated_by_category_and_event(attribution, len(trace.events))
    columns = {CATEGORY_NAMES[kind]: levels[kind] for kind in Category} | {
        "allocated": line.allocated,
        "reserved": line.reserved,
    }
    for name, column in columns.items():
        changes = np.flatnonzero(np.diff(column, prepend=0))
        for event, size in zip(changes.tolist(), column[changes].tolist(), strict=True):
            yield {"name": name, "ph": "C", "pid": 1, "ts": times[event], "args": {"bytes": size}}
    phase = attribution.phase_of_event
    edges = np.flatnonzero(np.diff(phase, prepend=255)).tolist()
    for begin, end in pairwise([*edges, len(phase)]):
        last = times[min(end, len(phase) - 1)]
        yield {
            "name": _PHASES[phase[begin]],
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "ts": times[begin],
            "dur": max(0, last - times[begin]),
        }
    for mark in trace.marks:
        if mark.kind is MarkKind.TRAINING_STEP and times:
            at = times[min(mark.position, len(times) - 1)]
            yield {
                "name": f"training step {mark.index + 1}",
                "ph": "i",
                "s": "p",
                "pid": 1,
                "tid": 1,
                "ts": at,
            }


def _times(trace: Trace) -> list[int]:
    """Return each event's time in microseconds since the first event, made non-decreasing."""
    if not len(trace.events):
        return []
    times = np.maximum.accumulate(trace.events.time)
    return [int(time) for time in (times - times[0])]


def allocations_csv(trace: Trace, attribution: Attribution) -> str:
    """Return every allocation as a row of comma-separated values; the first row names the columns."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(COLUMNS)
    tensors = attribution.tensor.tolist()
    columns = zip(
        *(column.tolist() for column in (attribution.born, attribution.freed, attribution.requested)),
        *(column.tolist() for column in (attribution.block, attribution.category, attribution.phase)),
        *(column.tolist() for column in (attribution.module, attribution.op, attribution.line)),
        tensors,
        strict=True,
    )
    for born, freed, requested, block, category, phase, module, op, line, tensor in columns:
        held = trace.tensors[tensor] if tensor >= 0 else None
        earlier = trace.events.action[born] == Action.EARLIER
        row = (
            "" if earlier else born,
            freed if freed < len(trace.events) else "",
            *(requested, block, CATEGORY_NAMES[Category(category)]),
            *(("", "") if earlier else (training_step_of_event(trace, born, _PHASES[phase]), _PHASES[phase])),
            _cell(attribution.modules[module]),
            _cell(attribution.ops[op]),
            *(("", "", "") if held is None else (_cell(held.name), _cell(held.dtype), _sizes(held.shape))),
            _cell(attribution.lines[line]),
        )
        writer.writerow(row)
    return text.getvalue()


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _cell(text: str) -> str:
    text = escaped(text.encode(errors="replace").decode(), whole=True)
    return f"'{text}" if text.startswith(_FORMULA) else text
