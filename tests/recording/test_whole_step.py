"""The operations of a training step, recorded while the script runs as without memfit."""

import textwrap
from collections import Counter
from pathlib import Path

import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.records import DRIVER, EVERY_STREAM, NO_STREAM, ON_CPU, Change, Phase
from memfit.run.options import RunOptions
from memfit.trace.trace_file import read_trace
from memfit.trials.trial_run import trial_runner

pytestmark = pytest.mark.warm

START = """
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    blocks = [Block().cuda() for _ in range(3)]
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(32, 64, device="cuda")
"""
LOOP = """
    for _ in range(4):
        for _ in range(MICRO):
            x = inputs
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=False) if CHECKPOINTED else block(x)
            x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
PRODUCT = 2 * 32 * 64 * 256
"""Floating-point operations of one product."""


def step_of(dry_run, tmp_path, loop, *, steps=3, micro=1, checkpointed=False):
    """Return the recorded step of a script, and the trace's labels."""
    script = textwrap.dedent(START) + textwrap.dedent(loop)
    script = script.replace("MICRO", str(micro)).replace("CHECKPOINTED", str(checkpointed))
    file = tmp_path / "run.memfit"
    dry_run(script, options=("--steps", str(steps), "-o", str(file)))
    trace = read_trace(Path(file))
    return trace.step, trace.labels


def products(step, labels):
    """Return how many products of the blocks' layers each phase runs."""
    found = Counter()
    for number, label in zip(step.order, step.labels, strict=True):
        found[labels[label].phase] += step.operations[number].flops == PRODUCT
    return {phase: count for phase, count in found.items() if count}


def test_each_product_of_a_step_is_recorded_once_in_its_phase_and_module(dry_run, tmp_path):
    step, labels = step_of(dry_run, tmp_path, LOOP)
    assert products(step, labels) == {Phase.FORWARD: 6, Phase.BACKWARD: 11}  # no gradient of the inputs
    modules = {labels[label].module for label in step.labels if labels[label].phase is Phase.FORWARD}
    assert {"0.up", "0.down", "2.up"} <= {module.partition(".")[2] or module for module in modules} | modules
    first = next(each for each in step.operations if each.flops == PRODUCT)
    assert [each.shape for each in first.operands] == [(256,), (32, 64), (64, 256)]
    assert [each.layout for each in first.operands] == ["", "", "transposed"]
    assert not step.tf32
    assert not step.replays


def test_what_a_checkpoint_runs_again_is_recorded_and_so_is_each_micro_batch(dry_run, tmp_path):
    step, labels = step_of(dry_run, tmp_path, LOOP, micro=2, checkpointed=True)
    found = products(step, labels)
    assert found[Phase.FORWARD] == 12
    assert found[Phase.RECOMPUTE] == 6  # it stops where the last layer has its inputs
    assert found[Phase.BACKWARD] == 22


def test_a_region_counts_once_though_it_computes_between_its_modules(dry_run, tmp_path):
    loop = """
    def both(x):
        return blocks[1](blocks[0](x) + 1)
    for _ in range(4):
        checkpoint(both, inputs, use_reentrant=False).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    assert step_of(dry_run, tmp_path, loop)[0].host.checkpointed_regions == 1


def test_the_second_of_two_steps_is_recorded_and_no_first_one(dry_run, tmp_path):
    step, labels = step_of(dry_run, tmp_path, LOOP, steps=2)
    assert products(step, labels) == {Phase.FORWARD: 6, Phase.BACKWARD: 11}
    assert step_of(dry_run, tmp_path, LOOP, steps=1)[0] is None


def test_a_step_with_updates_in_the_backward_is_recorded(dry_run, tmp_path):
    loop = """
    del optimizer
    own = {each: torch.optim.SGD([each], lr=0.1) for each in model.parameters()}
    def update(parameter):
        own[parameter].step()
        own[parameter].zero_grad()
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(update)
    for _ in range(5):
        model(inputs).square().mean().backward()
    """
    step, labels = step_of(dry_run, tmp_path, loop)
    assert products(step, labels) == {Phase.FORWARD: 6, Phase.BACKWARD: 11}


def test_what_the_cpu_computes_is_recorded_with_its_bytes_and_views_are_not(dry_run, tmp_path):
    loop = """
    shard, gradient = torch.ones(1 << 20, requires_grad=True), torch.ones(1 << 20)
    host, other = (torch.optim.SGD([shard], lr=0.1, foreach=each) for each in (False, True))
    for _ in range(4):
        data = torch.ones(1 << 20) * 2
        model(inputs).square().mean().backward()
        shard.grad = gradient
        optimizer.step()
        host.step()
        other.step()
        optimizer.zero_grad()
        shard.detach().view(1024, 1024)[:, 0]
    """
    step, labels = step_of(dry_run, tmp_path, loop)
    ran = [
        (step.operations[number], labels[label])
        for number, label in zip(step.order, step.labels, strict=True)
    ]
    found = [(each.name, each.moved, label.phase) for each, label in ran if each.name.startswith(ON_CPU)]
    assert [name for name, _, _ in found].count("cpu.aten::add_") == 1
    assert ("cpu.aten::add_", 3 * 4 << 20, Phase.OPTIMIZER) in found
    assert ("cpu.aten::_foreach_add_", 3 * 4 << 20, Phase.OPTIMIZER) in found
    assert ("cpu.aten::mul", (2 * 4 << 20) + 8, Phase.INPUT) in found
    assert {name for name, _, _ in found} <= {
        f"cpu.aten::{name}" for name in ("add_", "_foreach_add_", "mul", "ones")
    }


@pytest.mark.process
def test_a_record_for_plans_takes_the_host_no_time_of_the_step(tmp_path):
    script = tmp_path / "train.py"
    text = textwrap.dedent(START) + textwrap.dedent(LOOP)
    script.write_text(text.replace("MICRO", "1").replace("CHECKPOINTED", "False"))
    run = trial_runner((str(script),), RunOptions(unlimited=True), lambda _: None)
    plain, recorded = (run(Change(operations=given), "a run").trace.step for given in (False, True))
    assert recorded.host == plain.host


def test_a_fork_in_a_step_makes_the_recorder_wait_for_the_next(dry_run, tmp_path):
    loop = """
    import os
    for number in range(4):
        loss = model(inputs).square().mean()
        if number == 1:
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    step, labels = step_of(dry_run, tmp_path, loop)
    assert products(step, labels) == {Phase.FORWARD: 6, Phase.BACKWARD: 11}


def test_the_host_waits_where_the_script_reads_a_number(dry_run, tmp_path):
    step, _ = step_of(dry_run, tmp_path, LOOP.replace("x.square()", "print(x.sum().item()); x.square()"))
    waits = [step.operations[number].name for number in step.order if step.operations[number].waits]
    assert waits == ["aten._local_scalar_dense.default"]


@pytest.mark.parametrize(
    ("waits", "names"),
    [
        ("torch.cuda.synchronize()", ["cuda.synchronize"]),
        ("torch.cuda.current_stream().synchronize()", ["cuda.synchronize_stream"]),
        ("event = torch.cuda.Event(); event.record(); event.synchronize()", ["cuda.synchronize_event"]),
    ],
)
def test_the_host_waits_where_the_script_synchronises(dry_run, tmp_path, waits, names):
    step, _ = step_of(dry_run, tmp_path, LOOP.replace("optimizer.step()", f"{waits}; optimizer.step()"))
    found = [(place, step.operations[number]) for place, number in enumerate(step.order)]
    assert [each.name for _, each in found if each.waits] == names
    ((place, wait),) = [(place, each) for place, each in found if each.waits]
    assert (wait.stream, [before for after, before in step.after if after == place]) in (
        (EVERY_STREAM, []),
        (0, []),
        (NO_STREAM, [place - 1]),
    )
    assert step.host.operations == len(step.order) - 1


def test_memory_that_each_step_asks_of_the_driver_takes_time_and_a_growing_cache_does_not(dry_run, tmp_path):
    large = "large = torch.ones(1 << 24, device='cuda'); del large; torch.cuda.empty_cache()"
    emptied, _ = step_of(dry_run, tmp_path, LOOP.replace("optimizer.zero_grad()", large))
    names = Counter(emptied.operations[number].name for number in emptied.order)
    assert 0 < names["cuda.malloc"] <= names["cuda.free"]
    grown = "kept = globals().setdefault('kept', []); kept.append(torch.ones(1 << 24, device='cuda'))"
    growing, _ = step_of(dry_run, tmp_path, LOOP.replace("optimizer.zero_grad()", grown))
    assert not any(operation.name.startswith(DRIVER) for operation in growing.operations)


CAPTURED = """
    def step():
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    for _ in range(EAGER):
        step()
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph()):
        step()
    for _ in range(5):
        inputs.copy_(torch.randn(32, 64))
        graph.replay()
"""


@pytest.mark.parametrize("eager", [0, 1])
def test_what_a_cuda_graph_replays_is_what_was_captured(dry_run, tmp_path, eager):
    step, labels = step_of(dry_run, tmp_path, CAPTURED.replace("EAGER", str(eager)), steps=3)
    assert products(step, labels) == {Phase.FORWARD: 6, Phase.BACKWARD: 11}
    ((first, end),) = step.replays
    assert (first, end) == (1, len(step.order))  # after the copy of the inputs
    assert step.host.operations == 2
    assert step.host.launches + step.host.library_calls == 2


def test_graphs_of_a_forward_and_its_backward_are_replayed_in_their_places(dry_run, tmp_path):
    loop = """
        graphed = torch.cuda.make_graphed_callables(model, (inputs,))
        for _ in range(4):
            optimizer.zero_grad()
            graphed(inputs).square().mean().backward()
            optimizer.step()
    """
    step, labels = step_of(dry_run, tmp_path, loop)
    assert products(step, labels) == {Phase.FORWARD: 6, Phase.BACKWARD: 11}
    (forward, its_end), (backward, end) = step.replays
    assert forward < its_end < backward < end < len(step.order)


def test_the_gradient_that_images_do_not_need_is_no_tensor(dry_run, tmp_path):
    loop = """
        layer = nn.Conv2d(3, 8, 3).cuda().half()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(3):
            layer(torch.ones(2, 3, 8, 8, device="cuda", dtype=torch.half)).sum().backward()
            optimizer.step()
    """
    step, _ = step_of(dry_run, tmp_path, loop)
    backward = next(each for each in step.operations if "convolution_backward" in each.name)
    assert backward.dtype == "float16"
    assert [each.shape for each in backward.results] == [(8, 3, 3, 3), (8,)]


def test_what_only_a_gpu_has_a_kernel_for_is_recorded(dry_run, tmp_path):
    loop = """
        layers = nn.Sequential(nn.RMSNorm(64), nn.SiLU()).cuda()
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for _ in range(3):
            layers(inputs).sum().backward()
            optimizer.step()
    """
    step, _ = step_of(dry_run, tmp_path, loop)
    names = {each.name.split(".")[1] for each in step.operations}
    assert names >= {"_fused_rms_norm", "_fused_rms_norm_backward", "silu", "silu_backward"}


def test_what_only_changes_how_a_tensor_is_seen_or_freed_is_no_work_of_the_gpu(dry_run, tmp_path):
    loop = """
        side = torch.cuda.Stream()
        for _ in range(3):
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            model(inputs).detach_().unsqueeze_(0).record_stream(side)
    """
    step, _ = step_of(dry_run, tmp_path, loop)
    names = {each.name.split(".")[1] for each in step.operations}
    assert "zero_" in names
    assert not names & {"detach_", "unsqueeze_", "record_stream"}


def test_a_run_without_a_second_step_says_so(dry_run, tmp_path):
    step_of(dry_run, tmp_path, LOOP, steps=1)
    why = dry_run_of_trace(read_trace(tmp_path / "run.memfit")).step_time_unknown
    assert why == "the script completed only one training step, and memfit times the second"


def test_an_observer_whose_file_has_another_format_costs_the_time_only(dry_run):
    """The script writes over the file, which memfit reads when the script has ended."""
    moved = "import pathlib, tempfile\ntempfile.tempdir = '.'\n"
    spoilt = "for file in pathlib.Path().glob('memfit-step-*.json'): file.write_text('{}')\n"
    loop = LOOP.replace("MICRO", "1").replace("CHECKPOINTED", "False")
    done = dry_run(moved + textwrap.dedent(START) + textwrap.dedent(loop) + spoilt, options=("--steps", "9"))
    assert done.answer["verdict"] == "fits"
    assert done.answer["step_time"] is None
    assert done.answer["step_time_unknown"] == (
        "memfit cannot read what PyTorch's observer wrote "
        "(ValidationError: Object missing required field `nodes`)"
    )
    assert not list(done.folder.glob("memfit-step-*"))


def test_a_script_that_uses_the_observer_itself_has_it_and_costs_the_time_only(dry_run, tmp_path):
    """PyTorch has one observer: to stop it twice, as memfit and the script did in step 1, is a crash."""
    loop = """
        from torch.profiler import ExecutionTraceObserver
        for step in range(3):
            if step == 1:
                observer = ExecutionTraceObserver().register_callback("script.json")
                observer.start()
            loss = model(inputs).sum()
            if step == 1:
                observer.stop()
                observer.unregister_callback()
            loss.backward()
            optimizer.step()
    """
    step_of(dry_run, tmp_path, loop)
    why = dry_run_of_trace(read_trace(tmp_path / "run.memfit")).step_time_unknown
    assert why == "the script uses PyTorch's ExecutionTraceObserver itself"
    assert "finish_ts" in (tmp_path / "script.json").read_text()


def test_a_compiled_graph_without_a_list_of_its_kernels_costs_the_time_only(dry_run, tmp_path):
    """As of a graph that comes from a cache of the script's own."""
    cached = "__import__('memfit').recording.recorder._installed[-1]._step._run_compiled(print, object(), ())"
    loop = LOOP.replace("for _ in range(MICRO):", f"{cached}; x = inputs\n        for _ in range(1):")
    step_of(dry_run, tmp_path, loop)
    why = dry_run_of_trace(read_trace(tmp_path / "run.memfit")).step_time_unknown
    assert why == "a compiled graph came from a cache, which does not list its kernels"
