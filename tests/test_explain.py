"""`memfit explain` of traces, snapshots and files that are neither."""

import json
import os
import pickle
from pathlib import Path

import pytest

from memfit.records import Action
from memfit.trace.trace_file import write_trace
from support import warm_process
from support.traces import BASE, trace_of

pytestmark = [pytest.mark.process, pytest.mark.warm]

EXAMPLES = Path(__file__).parents[1] / "examples"
TRAIN = """
    import torch
    torch.cuda.memory._record_memory_history()
    model = torch.nn.Linear(512, 512).cuda()
    torch.cuda.memory._dump_snapshot("own.pickle")
    model(torch.ones(64, 512, device="cuda")).sum().backward()
    torch.cuda.memory._dump_snapshot("own.pickle")
"""


def memfit(folder, *arguments):
    return warm_process.memfit(*arguments, cwd=folder)


def explain(folder, *arguments):
    return memfit(folder, "explain", *arguments)


@pytest.fixture
def recorded(dry_run):
    return dry_run(TRAIN, options=("-o", "run.memfit"))


def test_a_saved_trace_gives_the_same_result_without_torch(recorded):
    explained = json.loads(explain(recorded.folder, "run.memfit", "--json", "-").stdout)
    assert {name: explained[name] for name in recorded.answer} == recorded.answer
    assert explained["held"]["allocated"] == recorded.answer["peak"]["allocated"]
    for rows in explained["held"]["rows"].values():
        assert sum(row["bytes"] for row in rows) == explained["held"]["allocated"]


def test_the_breakdown_is_that_of_the_chosen_moment_and_grouping(recorded):
    text = explain(recorded.folder, "run.memfit", "--at", "forward", "--by", "line").stdout
    assert "Allocated, by line: step 1 · forward · Linear" in text
    assert "script.py:4" in text
    assert ["parameters", "+1.00"] in [row.split() for row in text.splitlines()]  # 512 x 512 and 512
    done = explain(recorded.folder, "run.memfit", "--at", "lunch")
    assert done.returncode == 2
    assert done.stderr.startswith("memfit: --at lunch is not a moment of a run. Use one of peak, setup, ")


def test_dry_run_and_explain_write_the_html_report(dry_run):
    run = dry_run(TRAIN, options=("-o", "run.memfit", "--html", "run.html"))
    explain(run.folder, "run.memfit", "--html", "explained.html")
    explain(run.folder, "run.memfit", "--html", "bare.html", "--no-source")
    allocated = f'data-bytes="{run.answer["peak"]["allocated"]}"'
    for name, source in (("run", True), ("explained", True), ("bare", False)):
        page = (run.folder / f"{name}.html").read_text()
        assert allocated in page
        assert ("script.py" in page) == source
    explain(run.folder, "run.memfit", "--html", "none.html", "--at", "lunch")
    assert not (run.folder / "none.html").exists()


def test_the_ledger_of_one_linear_layer_equals_the_figures_of_a_real_gpu(dry_run):
    """An RTX 3060 with PyTorch 1.9.1, single-tensor AdamW, no cuBLAS workspace."""
    script = (EXAMPLES / "linear1024.py").read_text()
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}
    run = dry_run(script, options=("--steps", "1000", "-o", "run.memfit"), env=environment)
    first = json.loads(explain(run.folder, "run.memfit", "--json", "-").stdout)["ledger"][:5]
    assert [(change["phase"], change["after"], dict(change["by_category"])) for change in first] == [
        ("setup", 4_198_400, {"parameters": 4_194_304, "inputs": 4_096}),
        ("forward", 4_202_496, {"outputs": 4_096}),
        ("loss", 4_203_008, {"outputs": 512}),
        ("backward", 8_397_312, {"gradients": 4_194_304}),
        ("optimizer", 16_785_920, {"optimizer state": 8_388_608}),
    ]
    assert first[3]["peak"] - first[3]["after"] == 4_608
    assert first[4]["peak"] - first[4]["after"] == 8_388_608  # AdamW's temporaries
    printed = explain(run.folder, "run.memfit").stdout.split("What each phase changed, in MiB of blocks:")[1]
    assert [row.split() for row in printed.splitlines()[2:8]] == [
        ["setup", "4.00", "+4.00"],
        ["parameters", "+4.00"],
        ["step", "1", "backward", "8.01", "+4.00"],
        ["gradients", "+4.00"],
        ["step", "1", "optimizer", "16.01", "+8.00", "+8.00"],
        ["optimizer", "state", "+8.00"],
    ]


def test_snapshots_are_written_and_read(recorded):
    from_torch = json.loads(explain(recorded.folder, "own.pickle", "--json", "-").stdout)
    assert from_torch["verdict"] == "unknown"
    assert from_torch["peak"]["allocated"] == recorded.answer["peak"]["allocated"]
    assert "SNAPSHOT" in explain(recorded.folder, "own.pickle").stdout
    assert explain(recorded.folder, "run.memfit", "--snapshot", "ours.pickle").returncode == 0
    from_memfit = json.loads(explain(recorded.folder, "ours.pickle", "--json", "-").stdout)
    assert from_memfit["peak"]["reserved"] == recorded.answer["peak"]["reserved"]
    assert from_memfit["peak"]["allocated"] == recorded.answer["peak"]["allocated"]


def test_fragmentation_is_part_of_the_explanation(recorded):
    answer = json.loads(explain(recorded.folder, "run.memfit", "--fragmentation", "--json", "-").stdout)
    moments = {moment["name"]: moment for moment in answer.pop("fragmentation")["moments"]}
    assert moments["peak reserved"]["all"]["reserved"] == answer["peak"]["reserved"]
    assert moments["peak allocated"]["all"]["allocated"] == answer["peak"]["allocated"]
    assert moments["peak allocated"]["place"] == {
        key: answer["peak"][key] for key in ("step", "phase", "module", "op", "line", "function", "stage")
    }
    text = explain(recorded.folder, "run.memfit", "--fragmentation").stdout
    assert "FITS" in text
    assert "Fragmentation, MiB (exact)" in text
    assert "Fragmentation" not in explain(recorded.folder, "run.memfit").stdout


class Harmful:
    def __reduce__(self):
        return (print, ("this pickle ran code",))


@pytest.mark.parametrize(
    "content",
    [b"", b"PK\x03\x04 no zip", b"\x80\x04.", pickle.dumps(Harmful()), b"\x00" * 4096, b"import os\n"],
    ids=["empty", "not a zip", "empty pickle", "code", "zeros", "text"],
)
def test_an_unknown_file_gives_one_clear_error(tmp_path, content):
    (tmp_path / "file").write_bytes(content)
    done = explain(tmp_path, "file")
    assert done.returncode == 2
    assert done.stderr.startswith("memfit: Cannot read")
    assert "Traceback" not in done.stderr
    assert "this pickle ran code" not in done.stdout


@pytest.mark.parametrize("command", ["explain", "replay", "allocator"])
def test_an_invalid_action_is_refused_by_every_command(tmp_path, command):
    unknown = max(Action) + 1
    write_trace(trace_of([(Action.SEGMENT_ALLOC, BASE, 2 << 20), (unknown, BASE, 512)]), tmp_path / "file")
    done = memfit(tmp_path, command, "file")
    assert done.returncode == 2
    assert done.stderr.startswith("memfit: Cannot read file: it is inconsistent (")
    assert f"not between 0 and {max(Action)}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_file_is_an_error(tmp_path):
    done = explain(tmp_path, "nothing.memfit")
    assert done.returncode == 2
    assert "nothing.memfit" in done.stderr
