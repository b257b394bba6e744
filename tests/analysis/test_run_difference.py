"""The difference between two runs, and the folding of repeated modules."""

import json
import tracemalloc
from dataclasses import replace

import pytest

import memfit
from memfit.analysis.breakdown import compare_run_breakdowns
from memfit.analysis.fold_module_paths import fold_module_paths
from memfit.errors import UsageError
from memfit.records import (
    Action,
    Category,
    DeviceUse,
    EventLabel,
    Figure,
    GroupBy,
    JobRank,
    Phase,
    Provenance,
)
from memfit.report.public_json import result_to_json
from support.traces import BASE, Event, segment, trace_of


def run(*modules, size=600):
    """Return a trace in which each module allocates a block."""
    events = [Event(Action.SEGMENT_ALLOC, BASE, 2 << 20)]
    for place in range(len(modules)):
        activation = Category.ACTIVATION
        events.append(
            Event(Action.ALLOC, BASE + 1024 * place, size, label=place, stack=-1, category=activation)
        )
    labels = tuple(EventLabel(Phase.FORWARD, module, "Mm", -1) for module in modules)
    return trace_of(events, [segment(BASE, 2 << 20, "small")], labels=labels)


def rows(found):
    return {row.name: (row.before, row.after) for row in found.rows}


def test_layers_are_folded_over_both_runs():
    two, four = (run(*[f"blocks.{n}.fc" for n in range(count)], "head") for count in (2, 4))
    found = compare_run_breakdowns(two, four, by=GroupBy.MODULE)
    assert rows(found) == {"blocks.0-3.fc": (1200, 2400), "head": (600, 600), "rounding": (1272, 2120)}
    assert found.allocated == (3072, 5120)
    assert found.reserved == (2 << 20, 2 << 20)


def test_a_module_named_rounding_is_not_the_row_rounding():
    found = compare_run_breakdowns(run("rounding"), run("rounding", "head"), by=GroupBy.MODULE)
    assert sorted((row.name, row.before, row.after) for row in found.rows) == [
        ("head", 0, 600),
        ("rounding", 424, 848),
        ("rounding", 600, 600),
    ]


@pytest.mark.parametrize("by", GroupBy)
def test_rows_sum_to_the_allocated_bytes(by):
    found = compare_run_breakdowns(run("a", "b", "rounding"), run("b"), by=by)
    assert (sum(row.before for row in found.rows), sum(row.after for row in found.rows)) == found.allocated


def test_a_moment_that_one_run_lacks_is_refused():
    with pytest.raises(UsageError, match="has no backward phase"):
        compare_run_breakdowns(run("a"), run("a"), "backward")


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        ((JobRank(0, 8), JobRank(7, 8)), ("rank 0", "rank 7")),
        ((JobRank(0, 8), JobRank(0, 8)), ("before", "after")),
        ((JobRank(0, 4), JobRank(7, 8)), ("before", "after")),
        ((None, JobRank(7, 8)), ("before", "after")),
    ],
)
def test_two_ranks_of_a_job_are_named(ranks, names):
    found = memfit.diff(*(replace(run("a"), rank=rank) for rank in ranks))
    assert found.names == names
    assert str(found).startswith(f"{names[0]:<6}  peak in:")
    assert json.loads(result_to_json(found))["names"] == list(names)


def test_memory_outside_pytorch_is_compared_too():
    figure = Figure(100, Provenance.ASSUMED)
    device = DeviceUse("H100", Figure(1 << 30, Provenance.EXACT), figure, 0)
    with_nccl = replace(device, nccl=Figure(7, Provenance.ASSUMED))
    found = memfit.diff(*(replace(run("a"), device=each) for each in (device, with_nccl)))
    assert found.outside == (100, 107)
    lines = [line.split() for line in str(found).splitlines()]
    assert ["2,097,252", "2,097,259", "+7", "process", "at", "most"] in lines
    assert "CUDA context" not in str(memfit.diff(run("a"), run("b")))


def test_the_json_has_the_rows():
    answer = json.loads(result_to_json(memfit.diff(run("a"), run("b"), by="module")))
    assert answer["schema"] == 1
    assert answer["rows"][0] == {"name": "a", "before": 600, "after": 0}


def test_numbered_module_paths_are_folded():
    paths = ["", "h.0.fc", "h.1.fc", "h.1", "h.3.fc", "h.4.other", "mlp.0", "mlp.2", "h.01.fc"]
    assert fold_module_paths(paths) == [
        *("", "h.0-1,3.fc", "h.0-1,3.fc", "h.0-1,3", "h.0-1,3.fc", "h.4.other", "mlp.0", "mlp.2", "h.01.fc")
    ]


def test_folding_needs_memory_linear_in_the_paths():
    paths = [f"m{n}." + "a." * 4_000 + "b" for n in range(5)]
    tracemalloc.start()
    assert fold_module_paths(paths) == paths
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1000 * sum(map(len, paths))  # storing all prefixes would take 4,000 times as much
