"""Export a run for other tools: a table of all allocations.

Names come from the trace. A cell that a spreadsheet would read as a formula gets a leading apostrophe.
"""

import csv
import io

from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.analysis.event_locations import training_step_of_event
from memfit.records import Action, Attribution, Category, Phase, Trace
from memfit.report.escape_control_characters import escaped

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_PHASES = tuple(Phase)
COLUMNS = (
    *("born", "freed", "requested", "block", "category", "step", "phase", "module", "op", "name", "dtype"),
    *("shape", "line"),
)
"""Columns of the table. ``born`` and ``freed`` are events of the trace; ``freed`` may be empty."""


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
