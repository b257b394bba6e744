"""Every script in examples/ under `memfit dry-run`, unmodified, each in its own process.

The referee is the script itself: it ends by printing PyTorch's own peaks, and memfit's must equal them. Most
scripts run in forks of a warm process; those of ``IN_A_NEW_PYTHON`` also as their users start them.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from memfit.allocator.config import AllocatorConfig
from memfit.allocator.replay import replay_requests
from memfit.allocator.requests import allocator_requests_of_trace
from memfit.allocator.timeline import memory_timeline
from memfit.records import MarkKind
from memfit.trace.trace_file import read_trace
from support import warm_process

EXAMPLES = Path(__file__).parents[1] / "examples"
GOLDEN = Path(__file__).parents[1] / "benchmarks" / "torch_versions.json"  # and how each version gets there
GIB = 1 << 30


@dataclass(frozen=True)
class Example:
    """How to run one script to its own end, and the steps that memfit must count."""

    script: str
    arguments: tuple[str, ...] = ()
    steps: int | None = 3
    """Training steps until its own end; None where it has no optimizer to count by."""
    options: tuple[str, ...] = ("--gpu", "A100-80GB")
    """Options of `memfit dry-run`."""
    slow: bool = False

    @property
    def name(self) -> str:
        """The script and its arguments."""
        return " ".join((self.script, *self.arguments))


TO_THE_END = [
    Example("accumulation.py", ("--steps", "3"), slow=True),
    Example("amp_gradscaler.py", ("--steps", "3")),
    Example("checkpointed.py", ("--steps", "3"), slow=True),
    Example("compiled_gpt.py", slow=True),
    Example("compiled_graphs.py", steps=5, slow=True),
    Example("compiled_resnet.py", steps=4, slow=True),
    Example("ctc.py", ("--steps", "3")),
    Example("cuda_graph.py", steps=10),
    Example("gan.py", ("--steps", "3")),
    Example("generate.py", steps=None, slow=True),
    Example("gpt.py", ("--steps", "3"), slow=True),
    Example("gpt.py", ("--steps", "3", "--dtype", "bfloat16"), options=("--gpu", "RTX-3060"), slow=True),
    Example("gpt_chunked_head.py", ("--steps", "3"), slow=True),
    Example("gru.py", ("--steps", "3"), slow=True),
    Example("hf_trainer.py", ("--steps", "3"), slow=True),
    Example("inference.py", steps=None, slow=True),
    Example("linear1024.py", steps=2),
    Example("llama7b.py", options=("--memory", "160GiB"), slow=True),
    Example("longest_batch.py", ("--sentences", "160"), steps=10, slow=True),
    Example("lora.py", ("--steps", "3"), slow=True),
    Example("lora.py", ("--steps", "3", "--four-bit"), slow=True),
    Example("lstm.py", ("--steps", "3")),
    Example("manual_sgd.py", steps=None),
    Example("masked.py", slow=True),
    Example("mem_pool.py", steps=8, slow=True),
    Example("mlp.py", ("--epochs", "1"), steps=11, slow=True),
    Example("resnet50.py", ("--images", "96"), slow=True),
    Example("resnet50.py", ("--images", "96", "--channels-last", "--workers", "0"), slow=True),
    Example("retinanet.py", ("--steps", "3"), slow=True),
    Example("small_checkpointed.py", steps=None, slow=True),
    Example("svd.py", ("--steps", "3")),
    Example("triton_kernel.py"),
    Example("two_linear.py", steps=None),
    Example("unet.py", ("--steps", "3")),
    Example("vit_l16.py", ("--steps", "3"), slow=True),
    Example("whole_run.py", ("--samples", "64", "--eval-samples", "1024"), slow=True),
]


IN_A_NEW_PYTHON = {"accumulation.py", "compiled_graphs.py", "hf_trainer.py", "mem_pool.py", "retinanet.py"}
"""Examples whose first run imports everything itself: a loop of their own, a compiler, and two libraries."""


@dataclass(frozen=True)
class Run:
    """Result of one `memfit dry-run`."""

    answer: dict
    printed: str
    host_bytes: int | None = None
    """Peak resident memory of its largest process; None in a fork of a warm process."""


def dry_run(folder, *arguments, **environment):
    """Run `memfit dry-run` with the script's output and the JSON in separate files."""
    answer, printed = folder / "answer.json", folder / "printed.txt"
    with printed.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "memfit", "dry-run", "--json", answer, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **environment},
        )
        _, status, usage = os.wait4(process.pid, 0)  # its child processes included
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, printed.read_text()
    return Run(json.loads(answer.read_text()), printed.read_text(), usage.ru_maxrss * 1024)


def warm_dry_run(folder, *arguments):
    """Run `memfit dry-run` in a fork of a warm process."""
    answer = folder / "answer.json"
    done = warm_process.memfit("dry-run", "--json", answer, *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return Run(json.loads(answer.read_text()), done.stdout)


def own_peaks(printed):
    """Return the peaks that the script itself printed at its end, by name; bytes."""
    found = re.findall(r"^peak (allocated|reserved) ([\d,]+) B$", printed, re.MULTILINE)
    return {name: int(amount.replace(",", "")) for name, amount in found}


WITH_MEMFIT = {"digits.py", "gpt_chunked_head.py"}
"""Examples that import memfit; test_training_examples.py runs digits.py."""


def test_every_example_is_in_the_table():
    in_the_table = {example.script for example in TO_THE_END}
    assert in_the_table | WITH_MEMFIT == {path.name for path in EXAMPLES.glob("*.py")}
    for name in in_the_table - WITH_MEMFIT:
        assert "memfit" not in (EXAMPLES / name).read_text(), name


@pytest.mark.process
@pytest.mark.parametrize(
    "example",
    [pytest.param(each, marks=[pytest.mark.slow] * each.slow, id=each.name) for each in TO_THE_END],
)
def test_peaks_equal_those_the_script_prints_with_labels_and_without(example, tmp_path):
    trace, script = tmp_path / "run.memfit", EXAMPLES / example.script
    start = dry_run if example.script in IN_A_NEW_PYTHON else warm_dry_run
    run = start(tmp_path, "-o", trace, *example.options, "--steps", "1000", "--", script, *example.arguments)
    assert run.answer["verdict"] == "fits"
    assert run.answer["out_of_memory"] is None
    assert run.answer["end"]["reason"] == "end"
    own = own_peaks(run.printed)
    assert own["allocated"] > 0
    assert {name: run.answer["peak"][name] for name in ("allocated", "reserved")} == own
    golden = json.loads(GOLDEN.read_text())[run.answer["versions"]["torch"]]["peaks"]
    assert golden.get(" ".join((example.script, *example.arguments)), own) == own
    if example.steps is not None:
        assert run.answer["steps"] == example.steps
    assert_replay_reproduces(read_trace(trace))
    unlabelled = warm_dry_run(
        tmp_path, "--no-labels", *example.options, "--steps", "1000", "--", script, *example.arguments
    )
    assert own_peaks(unlabelled.printed) == own, "recording labels changed what the script allocates"
    assert unlabelled.answer["steps"] == run.answer["steps"]


def assert_replay_reproduces(trace):
    """Check that a replay under the trace's own settings has the same statistics, segments and blocks.

    A replay knows neither resets of the peaks by the script nor the former requested size of a free block.
    """
    device = trace.device
    replayed = replay_requests(
        allocator_requests_of_trace(trace),
        AllocatorConfig.read(trace.settings),
        total=device.total.bytes,
        taken=device.context.bytes + device.in_use,
    )
    assert replayed.fits
    reset = any(mark.kind is MarkKind.RESET_PEAK for mark in trace.marks)
    names = [name for name in replayed.statistics if not (reset and name.endswith(".peak"))]
    assert {name: trace.statistics[name] for name in names} == {
        name: replayed.statistics[name] for name in names
    }
    assert max(memory_timeline(trace).allocated) == replayed.peak_allocated
    assert max(memory_timeline(trace).reserved) == replayed.peak_reserved
    assert list(map(without_former_requests, sorted(trace.segments, key=by_address))) == list(
        replayed.segments
    )


def by_address(segment):
    return segment.address


def without_former_requests(segment):
    blocks = (replace(block, requested=0) if block.state == "inactive" else block for block in segment.blocks)
    return replace(segment, blocks=tuple(blocks))


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize(
    "script",
    [
        "gpt.py",
        "accumulation.py",  # four backward passes a step
        "amp_gradscaler.py",  # the scaler steps the optimizer
        "gan.py",  # two optimizers
        "hf_trainer.py",  # the loop is in a library
        "manual_sgd.py",  # no optimizer: backward passes count
        "resnet50.py",  # ends while workers are still loading
    ],
)
def test_a_longer_script_is_stopped_after_three_steps(script, tmp_path):
    run = warm_dry_run(tmp_path, "--gpu", "A100-80GB", "--steps", "3", EXAMPLES / script)
    assert run.answer["verdict"] == "fits"
    assert run.answer["steps"] == 3
    assert run.answer["end"]["reason"] == "steps"
    assert not own_peaks(run.printed)


@pytest.mark.process
def test_out_of_memory_is_a_result_with_its_line_and_phase(tmp_path):
    run = warm_dry_run(tmp_path, "--gpu", "RTX-3060", EXAMPLES / "gpt.py", "--batch-size", "32")
    assert run.answer["verdict"] == "out of memory"
    failure = run.answer["out_of_memory"]
    assert failure["step"] == 1
    assert failure["phase"] == "forward"
    assert failure["line"].startswith("gpt.py:") or "/gpt.py:" in failure["line"]
    assert failure["requested"] > 0
    assert failure["shortfall"] > 0


@pytest.mark.slow
@pytest.mark.process
def test_a_7b_model_built_on_the_cpu_costs_little_host_memory(tmp_path):
    run = dry_run(tmp_path, "--gpu", "A100-80GB", EXAMPLES / "llama7b.py")
    assert run.answer["verdict"] == "out of memory"
    assert run.host_bytes < 2 * GIB


@pytest.mark.slow
@pytest.mark.process
def test_json_on_standard_output_is_not_mixed_with_other_output(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dry-run", "--json", "-", EXAMPLES / "manual_sgd.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert json.loads(done.stdout)["verdict"] == "fits"


# Bytes that each line added on a real RTX 3060: PyTorch 1.9.1, single-tensor AdamW, no cuBLAS workspace.
LINEAR_1024 = {
    "model": 4_194_304,
    "inputs": 4_096,
    "outputs": 4_096,
    "loss": 512,
    "backward": 4_194_304,
    "step 1": 8_388_608,
    "step 2": 0,
}
TWO_LINEAR = {
    "first": 4_194_304,
    "second": 4_096,
    "inputs": 4_194_304,
    "loss": 4_194_304 + 512,
    "backward": -4_194_304 + 4_194_304 + 4_096,
    "loss again": 4_194_304,
    "backward again": -4_194_304,
}


def added_by_line(printed):
    """Return what each line of the script added; bytes."""
    found = re.findall(r"^(\S+(?: \S+)*) +[\d,]+ +([+-][\d,]+)$", printed, re.MULTILINE)
    return {name: int(amount.replace(",", "")) for name, amount in found}


@pytest.mark.process
@pytest.mark.parametrize(
    ("script", "real"),
    [("linear1024.py", LINEAR_1024), pytest.param("two_linear.py", TWO_LINEAR, marks=pytest.mark.slow)],
)
def test_each_line_adds_what_a_real_gpu_added(script, real, tmp_path):
    run = dry_run(tmp_path, "--steps", "1000", EXAMPLES / script, CUBLAS_WORKSPACE_CONFIG=":0:0")
    added = added_by_line(run.printed)
    assert {line: added[line] for line in real} == real


@pytest.mark.slow
@pytest.mark.process
def test_the_optimizers_temporaries_equal_those_on_a_real_gpu(tmp_path):
    run = dry_run(tmp_path, "--steps", "1000", EXAMPLES / "linear1024.py", CUBLAS_WORKSPACE_CONFIG=":0:0")
    held = sum(LINEAR_1024.values())
    assert run.answer["peak"]["allocated"] == held + 8_388_608
