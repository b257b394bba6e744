"""A run for other tools: a Chrome trace, a table of allocations, and two runs side by side."""

import csv
import io
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

import memfit
from memfit.api.traces import allocation_table
from memfit.records import (
    Action,
    Category,
    EventLabel,
    Frame,
    GroupBy,
    Mark,
    MarkKind,
    Phase,
    SnapshotBlock,
    TensorInfo,
)
from memfit.report.escape_control_characters import escaped
from memfit.report.public_json import result_to_json
from memfit.report.terminal.run_differences import print_run_difference
from memfit.report.trace_exports import COLUMNS
from support.traces import BASE, Event, freed, segment, trace_of

MIB = 1 << 20
HOSTILE = "=cmd|' /C calc'!A0\x1b[31m<script>"


def run(size=1000, module="fc", file="train.py"):
    """Return a trace of a parameter, and of an activation that is freed."""
    after = BASE + -(-size // 512) * 512
    return trace_of(
        [
            Event(Action.SEGMENT_ALLOC, BASE, 2 * MIB, label=0),
            Event(Action.ALLOC, BASE, size, label=0, stack=0, category=Category.PARAMETER),
            Event(Action.ALLOC, after, 700, label=1, stack=0, category=Category.ACTIVATION),
            *freed(after, 700, label=2),
        ],
        [segment(BASE, 2 * MIB, "small")],
        labels=(
            EventLabel(Phase.SETUP, "", "", -1),
            EventLabel(Phase.FORWARD, module, "Addmm", -1),
            EventLabel(Phase.BACKWARD, module, "AddmmBackward0", -1),
        ),
        stacks=((0,),),
        frames=(Frame(file, 3, "main", user=True),),
        marks=(
            Mark(2, MarkKind.FORWARD, 0),
            Mark(3, MarkKind.BACKWARD, 0),
            Mark(5, MarkKind.TRAINING_STEP, 0),
        ),
        command=("train.py",),
    )


def named(trace, name):
    """Give the first allocation a name."""
    tensor = np.full(len(trace.events), -1, np.int32)
    tensor[1] = 0
    events = replace(trace.events, tensor=tensor)
    return replace(trace, events=events, tensors=(TensorInfo("fc", name, "float32", (250,)),))


def test_the_table_has_a_row_for_each_allocation():
    rows = list(csv.DictReader(io.StringIO(allocation_table(named(run(), "weight")))))
    assert tuple(rows[0]) == COLUMNS
    expected = ("1", "", "1000", "1024", "parameters", "0", "setup", "fc", "", "weight", "float32", "250")
    assert rows[0] == dict(zip(COLUMNS, (*expected, "train.py:3"), strict=True))
    assert (rows[1]["category"], rows[1]["freed"], rows[1]["op"]) == ("activations", "3", "Addmm")
    assert rows[1]["line"] == "train.py:3"


def test_blocks_older_than_the_history_have_no_birth_step_or_phase():
    live = segment(BASE, 2 * MIB, "small", blocks=[SnapshotBlock(BASE, 2 * MIB, 600, "active_allocated")])
    trace = trace_of([(Action.EARLIER, BASE, 600), (Action.OOM, 0, 1 << 30)], [live])
    (row,) = csv.DictReader(io.StringIO(allocation_table(trace)))
    assert (row["born"], row["step"], row["phase"], row["requested"]) == ("", "", "", "600")


def test_a_cell_cannot_be_a_formula():
    text = allocation_table(named(run(module=HOSTILE), HOSTILE))
    rows = list(csv.DictReader(io.StringIO(text)))
    assert "\x1b" not in text
    assert rows[0]["name"] == rows[1]["module"] == f"'{escaped(HOSTILE)}"


def test_an_empty_run_can_be_exported():
    assert allocation_table(trace_of([])).strip() == ",".join(COLUMNS)


@pytest.mark.parametrize("by", GroupBy)
def test_rows_of_a_difference_sum_to_the_allocated_bytes(by):
    found = memfit.diff(run(size=1000), run(size=5000, module="fc2"), by=by)
    assert found.allocated == (1024 + 1024, 5120 + 1024)
    for which in ("before", "after"):
        assert sum(getattr(row, which) for row in found.rows) == found.allocated[which == "after"]
    changes = [abs(row.after - row.before) for row in found.rows]
    assert changes == sorted(changes, reverse=True)


def test_changed_rows_are_printed_with_names_escaped():
    console = Console(file=io.StringIO(), width=120, highlight=False, markup=False, emoji=False)
    print_run_difference(memfit.diff(run(), run(size=5000, module="\x1b[31mred"), by="module"), console)
    text = console.file.getvalue()
    assert "+4,096" in text  # of blocks: 5,120 less 1,024
    assert "\x1b" not in text
    found = json.loads(result_to_json(memfit.diff(run(), run(size=5000))))
    assert found["rows"][0] == {"name": "parameters", "before": 1000, "after": 5000}
