"""When memory runs out, memfit writes what held it, and the script gets its exception as usual."""

import re

import pytest

from memfit.allocator.timeline import memory_timeline, timeline_disagreement_with_pytorch
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import breakdown_at
from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.records import Category, GroupBy, MachineKind
from memfit.trace.trace_file import read_trace
from support.scripts import WATCHED

PARAMETERS = 4 * 821_248
GIB = 1 << 30
FAILS = """
    model = Net().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    steps(model, optimizer, 1)  # before the watch begins
    with memfit.watch(labels=LABELS):
        steps(model, optimizer, 2)
        steps(model, optimizer, 1, batch=1 << 23)  # 16 GiB for each result, 2 GiB for the input
"""


CONTINUES = """
    import gc, os

    def fail():
        model = Net().cuda()
        try:
            steps(model, torch.optim.Adam(model.parameters()), 1, batch=1 << 23)
        except torch.OutOfMemoryError:
            return
        raise AssertionError

    def too_much(*_):
        torch.empty(1 << 40, device="cuda")

    def after_the_model():
        result = model(torch.ones(8, 64, device="cuda"))
        too_much()

    def in_the_backward():
        result = model(torch.ones(8, 64, device="cuda"))
        result.register_hook(too_much)
        result.sum().backward()

    def retried():
        model = Net().cuda()
        engine = memfit.Engine(
            model,
            optimizer=torch.optim.Adam(model.parameters()),
            loss=lambda model, batch: model(batch).square().mean(),
        )
        failures = torch.cuda.memory_stats()["num_ooms"]
        engine.step(torch.ones(1 << 23, 64, device="cuda"))
        return torch.cuda.memory_stats()["num_ooms"] - failures, torch.cuda.memory_allocated()

    fail()
    gc.collect()
    alone = retried()
    before = torch.cuda.memory_allocated()
    with memfit.watch(files=2):
        assert retried() == alone
        gc.collect()
        for _ in range(4):
            fail()
            assert torch.cuda.memory_allocated() == before
    os.mkdir("more")
    model = Net().cuda()
    with memfit.watch(folder="more"):
        for fails in (too_much, after_the_model, in_the_backward):
            try:
                fails()
            except torch.OutOfMemoryError:
                pass
    import memfit.watching.postmortem as postmortem

    def no_page(*_):
        raise OSError(28, "No space left on device")

    os.mkdir("small")
    def nothing_yet(trace, path):
        assert not [name for name in os.listdir("small") if name.endswith(".memfit")]
        write_trace(trace, path)

    page, write_trace = postmortem.run_report_html, postmortem.write_trace
    postmortem.run_report_html, postmortem.write_trace = no_page, nothing_yet
    with memfit.watch(folder="small"):
        fail()
    postmortem.run_report_html, postmortem.write_trace = page, write_trace
    os.mkdir("gone")
    with memfit.watch(folder="gone"):
        os.rmdir("gone")
        fail()
"""


def rows_at_the_end(trace):
    line = memory_timeline(trace)
    found = breakdown_at(trace, line, attribute_allocations(trace, line), len(trace.events) - 1)
    return found, {row.name: row.bytes for row in found.rows[GroupBy.CATEGORY] if row.bytes}


@pytest.mark.parametrize("labels", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_post_mortem_names_what_held_the_memory(rehearse, tmp_path, labels):
    done = rehearse(WATCHED + FAILS.replace("LABELS", str(labels)))
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00" in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("memfit:")]
    where = r"step 3 · forward · Net · (\w+ · )?script\.py:12"
    assert re.fullmatch(rf"memfit: out of memory: 16\.0 GiB requested, 12\.7 GiB free, in {where}", lines[0])
    assert lines[1].startswith("memfit: 66.0 GiB allocated: activations ")
    assert lines[2:4] == [
        "memfit: written: memfit-oom-1.memfit (memfit explain)",
        "memfit: written: memfit-oom-1.html",
    ]
    assert lines[4].startswith("memfit: step 2 · peak ")
    assert len(lines) == 5

    trace = read_trace(tmp_path / "memfit-oom-1.memfit")
    assert (
        timeline_disagreement_with_pytorch(trace, memory_timeline(trace)) == ""
    )  # with PyTorch's own counters
    answer = dry_run_of_trace(trace)
    assert (answer.verdict, answer.device.machine, answer.steps) == (
        "out of memory",
        MachineKind.REHEARSAL,
        2,
    )
    found, rows = rows_at_the_end(trace)
    assert (found.place.step, found.place.module) == (3, "Net")
    assert sum(rows.values()) == found.allocated
    # relu's result, a block's, and sin's are saved; the next block's is not yet: sin found no memory.
    saved = {"activations": 48 * GIB, "inputs": 2 * GIB}
    workspaces = rows.pop("unknown")
    assert rows == saved | {
        "outputs": 16 * GIB,
        "parameters": PARAMETERS,
        "optimizer state": 2 * PARAMETERS,
    }
    assert workspaces == 2 * 8_519_680  # cuBLAS's, of the forward's thread and the backward's

    parameters = trace.events.tensor[trace.events.category == Category.PARAMETER]
    names = {f"{trace.tensors[at].module}.{trace.tensors[at].name}" for at in parameters.tolist()}
    layers = ("first", *(f"blocks.{block}" for block in range(3)))
    assert names == {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}
    assert "Net" in (tmp_path / "memfit-oom-1.html").read_text()


@pytest.mark.slow
def test_post_mortems_of_a_script_that_continues_are_limited_and_numbered(rehearse, tmp_path):
    """No file name is used twice, the number of files is limited, and no memory of failed steps is kept."""
    (tmp_path / "memfit-oom-1.memfit").write_text("mine")
    done = rehearse(WATCHED + CONTINUES)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "memfit-oom-1.memfit").read_text() == "mine"
    left = {path.name for path in tmp_path.iterdir()} - {"script.py", "more", "small"}
    written = {f"memfit-oom-{number}.{kind}" for number in (2, 3) for kind in ("memfit", "html")}
    assert left == written | {"memfit-oom-1.memfit"}
    assert re.findall(r"4\.0 TiB requested, .* in (.*) · script", done.stderr) == [
        "setup",
        "step 1 · loss",
        "step 1 · backward",
    ]
    assert done.stderr.count("memfit: out of memory again; memfit writes no further post-mortem") == 1
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["memfit-oom-1.memfit"]
    assert done.stderr.count("memfit: no report was written: OSError: ") == 1
    assert done.stderr.count("memfit: no post-mortem was written: OutputError: Cannot write ") == 1
