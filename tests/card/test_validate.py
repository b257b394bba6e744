"""benchmarks/gpu/validate.py in rehearsal, and how it compares two traces."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.records import (
    Action,
    DeviceUse,
    EventLabel,
    Figure,
    MachineKind,
    Phase,
    Provenance,
)
from support.modules_by_path import module_of
from support.traces import Event, trace_of

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.xdist_group("validate"),
]  # on one worker: the tests share a rehearsal

GPU = Path(__file__).parents[2] / "benchmarks/gpu"
JOBS = ("linear1024", "attention flash")


@pytest.fixture(scope="module")
def compare():
    """Return the compare module, loaded by path: benchmarks are not a package."""
    return module_of(GPU / "compare.py")


def trace(*events):
    """Make a trace of (action, size, label) events."""
    figure = Figure(1 << 30, Provenance.EXACT)
    return trace_of(
        [Event(action, 0, size, label=label) for action, size, label in events],
        labels=(
            EventLabel(Phase.FORWARD, "conv", "", -1),
            EventLabel(Phase.BACKWARD, "conv", "ConvolutionBackward0", -1),
        ),
        device=DeviceUse("card", figure, figure, 0, MachineKind.CARD),
    )


OUTPUT, GRADIENT = (Action.ALLOC, 1000, 0), (Action.ALLOC, 2000, 1)
WORKSPACE = (Action.ALLOC, 58_720_256, 1), (Action.FREE_REQUESTED, 58_720_256, 1)


def test_equal_traces_are_identical(compare):
    found = compare.difference(trace(OUTPUT, GRADIENT), trace(OUTPUT, GRADIENT))
    assert found.identical
    assert (found.first, found.only_card, found.only_ghost) == ("", (), ())


def test_a_workspace_only_on_the_card_is_named_with_its_operation(compare):
    found = compare.difference(trace(OUTPUT, *WORKSPACE, *WORKSPACE, GRADIENT), trace(OUTPUT, GRADIENT))
    assert not found.identical
    (only,) = found.only_card
    assert (only.phase, only.module, only.op) == ("backward", "conv", "ConvolutionBackward0")
    assert (only.bytes, only.count) == (58_720_256, 2)
    assert found.only_ghost == ()
    assert found.first == (
        "event 1: card alloc 58,720,256 B (backward conv ConvolutionBackward0), "
        "ghost alloc 2,000 B (backward conv ConvolutionBackward0)"
    )


def test_a_run_that_ends_earlier_is_a_difference(compare):
    found = compare.difference(trace(OUTPUT), trace(OUTPUT, GRADIENT))
    assert not found.identical
    assert found.first.startswith("event 1: card has ended, ghost alloc 2,000 B")
    assert [only.bytes for only in found.only_ghost] == [2000]


def test_the_same_requests_in_another_order_are_not_identical(compare):
    found = compare.difference(trace(OUTPUT, GRADIENT), trace(GRADIENT, OUTPUT))
    assert not found.identical
    assert (found.only_card, found.only_ghost) == ((), ())


def test_events_that_move_no_memory_are_not_compared(compare):
    with_snapshot = trace(OUTPUT, (Action.SNAPSHOT, 5, 0), GRADIENT)
    assert compare.difference(with_snapshot, trace(OUTPUT, GRADIENT)).identical
    unlabelled = replace(with_snapshot.events, label=with_snapshot.events.label * 0 - 1)
    assert compare.difference(replace(with_snapshot, events=unlabelled), with_snapshot).identical


def test_a_rehearsal_of_two_jobs_shows_no_difference_and_is_marked_as_one(tmp_path):
    done = subprocess.run(
        [sys.executable, GPU / "validate.py", "--rehearse", "A100-80GB", "--out", tmp_path, "--only", *JOBS],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("*.json")
    assert file.name.startswith("rehearsal-NVIDIA_A100-SXM4-80GB-")
    result = json.loads(file.read_text())
    assert result["machine"] == "rehearsal"
    assert result["calibration"]["total_by_cudaMemGetInfo"] == 85_094_825_984
    assert set(result["jobs"]) == set(JOBS)
    for job in result["jobs"].values():
        assert job["status"] == "done"
        for figure in ("allocated", "reserved", "process", "steps", "verdict"):
            assert job["card"][figure] == job["ghost"][figure]
        assert job["card"]["allocated"] > 0
        assert job["card"]["outside_provenance"] == "assumed"
        assert job["difference"]["identical"]
    table = file.with_suffix(".md").read_text()
    assert table.startswith("# REHEARSAL, nothing was measured: NVIDIA A100-SXM4-80GB")
    assert "| linear1024 | 40.3 | 0 |" in table


def test_every_job_names_an_existing_script():
    import tomllib

    jobs = tomllib.loads((GPU / "jobs.toml").read_text())["job"]
    assert len({job["name"] for job in jobs}) == len(jobs)
    for job in jobs:
        assert (GPU.parents[1] / job["script"]).is_file()
    used = {Path(job["script"]).name for job in jobs}
    assert {path.name for path in (GPU / "jobs").glob("*.py")} <= used
