"""Scripts with torch.compile: recording changes neither graphs nor memory, and labels each graph.

Compilers are slow, so each script serves many tests.
"""

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from memfit.ghost.build.runtime_library import build_ghost
from memfit.records import Action, Phase, Trace
from memfit.trace.trace_file import read_trace
from support.new_processes import run_python

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the runs of a fixture included
    pytest.mark.xdist_group("compile"),  # on one worker: the tests share runs
]

SCRIPT = """
    import os
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = "mine"  # the user's own cache, which must stay unchanged
    import torch, torch._dynamo
    from torch import nn
    from torch._dynamo.utils import counters

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 64)
        def forward(self, x):
            x = x * torch.ones(64, device=x.device) + torch.full((1,), 2.0, device=x.device)
            x = self.inner(x.clone()).relu_()
            torch._dynamo.graph_break()
            return self.outer(x)

    def report(name):
        stats = torch.cuda.memory_stats()
        sums = [stats[key] for key in ("allocation.all.allocated", "allocated_bytes.all.allocated",
                                       "allocated_bytes.all.peak", "reserved_bytes.all.peak")]
        breaks = sum(counters["graph_break"].values())
        print("@", name, counters["stats"]["unique_graphs"], breaks, *sums)

    model = Net().cuda()
    net = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3))
    update = torch.compile(optimizer.step)
    for _ in range(3):  # graph breaks, and an optimizer that is compiled
        net(torch.randn(32, 64, device="cuda")).square().mean().backward()
        update()
        optimizer.zero_grad()
    report("module, optimizer")

    static = nn.Sequential(nn.Linear(64, 64), nn.GELU()).cuda()
    @torch.compile(mode="reduce-overhead", fullgraph=True)
    def loss(x):
        return static(x).square().mean()
    for _ in range(4):  # warm up, record, replay
        loss(torch.randn(32, 64, device="cuda")).backward()
        static.zero_grad()
    report("function, CUDA graphs")
"""

BARE = """
    import runpy
    from contextlib import suppress
    from pathlib import Path
    from memfit.devices import find_device
    from memfit.ghost.build.runtime_library import build_ghost
    from memfit.ghost.ghost_device import GhostDevice
    from memfit.ghost.load_ghost import load
    ghost = load(build_ghost())
    ghost.configure(GhostDevice.of(find_device("A100-80GB")))
    import torch
    from memfit.ghost.compile import isolate_torch_compile
    isolate_torch_compile.isolate_compilation(ghost, Path("bare").absolute(), lambda *_, **__: None)
    runpy.run_path("script.py", run_name="__main__")
"""


@dataclass(frozen=True)
class Run:
    """The output of a process, and the trace that it wrote."""

    out: str
    err: str
    folder: Path
    trace: Trace | None = None
    answer: dict | None = None

    @property
    def reported(self):
        """Return the lines with the script's own figures."""
        return [line for line in self.out.splitlines() if line.startswith("@")]


def run_script(folder, script, *options, **environment):
    """Run a script under ``memfit dry-run`` and read its trace."""
    (folder / "script.py").write_text(textwrap.dedent(script))
    trace, answer = folder / "run.memfit", folder / "answer.json"
    command = ("-m", "memfit", "dry-run", "-o", trace, "--json", answer, *options, "script.py")
    done = run_python(*command, cwd=folder, timeout=900, **environment)
    assert done.returncode == 0, done.stderr
    return Run(done.stdout, done.stderr, folder, read_trace(trace), json.loads(answer.read_text()))


def line_of(text):
    """Return the line number of a text in the script."""
    (found,) = (number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line)
    return found


@pytest.fixture(scope="module")
def cold(tmp_path_factory):
    """Return an environment with an empty memfit cache, except for the built ghost."""
    folder = tmp_path_factory.mktemp("cache")
    (folder / "ghost").symlink_to(build_ghost().folder.parent)
    return {"MEMFIT_CACHE": str(folder)}


@pytest.fixture(scope="module")
def labelled(tmp_path_factory, cold):
    return run_script(tmp_path_factory.mktemp("labelled"), SCRIPT, "--steps", "1000", **cold)


@pytest.fixture(scope="module")
def unlabelled(tmp_path_factory, cold, labelled):
    """Return a second run, without labels and with warm caches."""
    return run_script(tmp_path_factory.mktemp("plain"), SCRIPT, "--steps", "1000", "--no-labels", **cold)


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Return a run on the ghost alone, without recording."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    (folder / "bare.py").write_text(textwrap.dedent(BARE))
    done = run_python("bare.py", cwd=folder, timeout=900)
    assert done.returncode == 0, done.stderr
    return Run(done.stdout, done.stderr, folder)


def test_recording_changes_neither_graphs_nor_allocations(labelled, unlabelled, bare):
    assert len(bare.reported) == 2
    assert labelled.reported == bare.reported
    assert unlabelled.reported == bare.reported


def test_every_allocation_is_the_same_with_labels_and_without(labelled, unlabelled):
    def allocations(run):  # not frees: their order depends on Python's garbage collector
        events = run.trace.events
        kept = (events.action == Action.ALLOC) | (events.action == Action.SEGMENT_ALLOC)
        return list(zip(events.action[kept], events.size[kept], events.stream[kept], strict=True))

    assert len(allocations(labelled)) > 200
    assert allocations(labelled) == allocations(unlabelled)


def test_recording_adds_no_warnings(labelled, bare):
    def warnings(run):
        return {line for line in run.err.splitlines() if "Warning" in line or "torch._dynamo" in line}

    assert warnings(labelled) <= warnings(bare)


def test_graphs_are_labelled_forward_and_backward(labelled):
    seen = {(label.phase, label.module, label.op) for label in labelled.trace.labels}
    first = f"compiled graph 0 (Net.forward, script.py:{line_of('def forward')})"
    second = f"compiled graph 1 (Net.forward, script.py:{line_of('graph_break()')})"
    for op in (first, second):
        assert {(Phase.FORWARD, "Net", op), (Phase.BACKWARD, "Net", op)} <= seen
    assert any(phase is Phase.OPTIMIZER and op.startswith("compiled graph 2 (") for phase, _, op in seen)
    assert {phase for phase, _, op in seen if op.startswith("compiled graph 3 (loss, script.py:")} == {
        Phase.FORWARD,
        Phase.BACKWARD,
    }
    # No stack contains generated code.
    assert not any("compiled-graphs/" in frame.file for frame in labelled.trace.frames)
    (note,) = (note.text for note in labelled.trace.notes if note.text.startswith("torch.compile made"))
    assert "graphs" in note


def test_folding_constants_reads_no_unknown_value(labelled):
    assert not [note for note in labelled.trace.notes if "read a GPU value" in note.text]


def test_steps_of_a_compiled_optimizer_are_counted(labelled):
    assert labelled.answer["steps"] == 3
    assert labelled.answer["end"]["reason"] == "end"


def test_the_users_compiler_caches_are_unchanged(labelled, cold):
    assert not (labelled.folder / "mine").exists()
    assert any(Path(cold["MEMFIT_CACHE"], "compiled-graphs", "inductor-3").rglob("*.py"))
    assert not list(Path(cold["MEMFIT_CACHE"]).rglob("*.best_config"))


def test_placeholder_machine_code_is_compiled_once(labelled, cold):
    cubins = [path.read_bytes() for path in Path(cold["MEMFIT_CACHE"]).rglob("triton_poi*.cubin")]
    assert len(cubins) > 1
    assert len(set(cubins)) == 1


def test_private_pools_are_in_the_trace_and_not_a_leak(labelled):
    pools = {segment.pool for segment in labelled.trace.segments}
    assert (0, 0) in pools
    assert len(pools) > 1
    assert not labelled.answer["growth"]["leak"]


GRAPHED = """
    import torch
    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.ones(64, 512, device="cuda")
    def step():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for n in range(3): step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for n in range(100):
        graph.replay()
        print("replayed", n)
"""


def test_graph_replays_count_as_steps_and_the_warm_up_does_not(tmp_path):
    run = run_script(tmp_path, GRAPHED)
    assert run.answer["steps"] == 3
    assert run.answer["end"]["reason"] == "steps"
    assert run.out.count("replayed") == 2  # the third ends the script
    assert len({segment.pool for segment in run.trace.segments}) == 2
    assert not run.answer["growth"]["leak"]


KERNEL = """
    import torch, triton, triton.language as tl

    @triton.autotune([triton.Config({"BLOCK": block}) for block in (256, 512, 1024)], key=["size"])
    @triton.jit
    def double(x, size, BLOCK: tl.constexpr):
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(x + at, 2 * tl.load(x + at, at < size), at < size)

    x = torch.ones(4096, device="cuda")
    double[lambda meta: (triton.cdiv(4096, meta["BLOCK"]),)](x, 4096)
    print("chosen", double.best_config.kwargs["BLOCK"], "known", x[0].item())
"""


def test_a_kernel_is_chosen_without_timing(tmp_path, cold):
    run = run_script(tmp_path, KERNEL, "--values", "float=7", **cold)
    assert "chosen 256 known 7.0" in run.out  # the kernel wrote to x, so its ones are no longer known
    assert any("first candidate" in note.text for note in run.trace.notes)
    events, labels = run.trace.events, run.trace.labels
    # Triton clears the L2 cache with this buffer.
    flushed = (events.action == Action.ALLOC) & (events.size == 256 << 20)
    assert flushed.any()
    assert {labels[index].op for index in events.label[flushed]} == {"timing kernels"}
    # A user's kernel is compiled to real machine code.
    cubins = [path.read_bytes() for path in Path(cold["MEMFIT_CACHE"]).rglob("double.cubin")]
    assert len(set(cubins)) == len(cubins) == 3


EDITED = """
    import os
    import torch, torch._inductor.config as config
    from torch._dynamo.utils import counters
    os.environ.update(TORCHINDUCTOR_CACHE_DIR="mine", TRITON_CACHE_DIR="mine too")  # after Inductor's import
    config.autotune_local_cache, config.compile_threads = True, 4
    torch._dynamo.config.compiled_autograd = True

    @torch.compile
    def scaled(x):
        scale = torch.full((1024,), 1024.0, device=x.device).sqrt()
        return x * scale

    @torch.compile
    def step(weight):
        weight.sin().sum().backward()

    x = torch.ones(1024, 1024, device="cuda")
    print("distinct", scaled(x).data_ptr() != x.data_ptr())
    step(x.requires_grad_())
    print("threads", config.compile_threads, "found", counters["inductor"]["fxgraph_cache_hit"])
    saved, _ = torch.compiler.save_cache_artifacts()
    whole = torch.compile(lambda x: x.tan(), fullgraph=True).aot_compile(((x.detach(),), {}))
    whole.save_compiled_function("compiled.bin")
    torch.export.export(torch.nn.Linear(8, 8, device="cuda"), (torch.ones(8, 8, device="cuda"),), strict=True)
    print("machine code", b"\\x7fELF" in saved, b"\\x7fELF" in open("compiled.bin", "rb").read())
"""


@pytest.fixture(scope="module")
def edited(tmp_path_factory, cold):
    """Run a script twice, the second time below ten more lines, so that the cache has its graphs."""
    folder = tmp_path_factory.mktemp("edited")
    return [run_script(folder, lines + textwrap.dedent(EDITED), **cold) for lines in ("", "#\n" * 10)]


def test_a_computed_constant_is_folded_as_on_a_real_gpu(edited):
    for run in edited:  # Inductor would drop a constant folded to 1 and return the input
        assert "distinct True" in run.out
        assert not [note for note in run.trace.notes if "read a GPU value" in note.text]


def test_graphs_from_the_cache_have_the_current_line_numbers(edited):
    assert "found 0" in edited[0].out
    assert "found 0" not in edited[1].out
    before, after = ({frame.line for frame in run.trace.frames if frame.user} for run in edited)
    assert before
    assert after == {line + 10 for line in before}


def test_caches_set_after_the_import_are_unchanged(edited):
    for run in edited:
        assert not list(run.folder.glob("mine*"))
        assert "threads 1 " in run.out


def test_placeholder_machine_code_is_not_saved_in_artifacts(edited):
    for run in edited:
        assert "machine code False False" in run.out


def test_compiled_autograd_is_labelled_as_backward(edited):
    for run in edited:
        (phase,) = {label.phase for label in run.trace.labels if "(compiled autograd)" in label.op}
        assert phase is Phase.BACKWARD
        assert not any("CompiledAutograd" in label.module for label in run.trace.labels)
