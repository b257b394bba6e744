"""Owners of memory, against figures found by other means: support/attribution_truth.py runs the same script.

Each script runs twice on the ghost: once under memfit, once under that script. At every backward and
optimizer step, both must report the same requested bytes.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import memfit
from memfit.allocator.timeline import memory_timeline
from memfit.analysis.attribution import attribute_allocations
from memfit.analysis.breakdown import breakdown_at
from memfit.records import Category, GroupBy, MarkKind, Phase, TensorInfo
from support import warm_process

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
SUPPORT = ROOT / "tests/support"
EXAMPLES = (
    *("accumulation", "amp_gradscaler", "checkpointed", "ctc", "gan", "gpt", "gru", "hf_trainer"),
    *("linear1024", "lora", "lstm", "masked", "mlp", "resnet50", "retinanet", "unet", "vit_l16"),
)
JOBS = {
    "copies.py list": "",
    "copies.py averaged_model": "",
    "copies.py timm": "timm",
    "copies.py diffusers": "diffusers",
    "quantised.py 4": "bitsandbytes",
    "quantised.py 8": "bitsandbytes",
    "cudnn_benchmark.py": "",
    "lightning_fit.py": "lightning",
}
"""Scripts in support/attribution_jobs with their arguments, and the package that each needs."""
DISTRIBUTED = (
    *("checkpoint", "context_parallel", "ddp", "expert_parallel", "fsdp1", "fsdp2", "hsdp", "pipeline"),
    *("tensor_parallel", "zero1"),
)
RANKS = ("--gpu", "H100", "--nproc", "8")
KINDS = {
    "saved": Category.ACTIVATION,
    "parameters": Category.PARAMETER,
    "gradients": Category.GRADIENT,
    "optimizer state": Category.OPTIMIZER_STATE,
    "copies": Category.COPY,
    "held": Category.HELD,
}
NO_TENSOR = TensorInfo("", "", "", ())  # last, where index -1 finds it
MOMENTS = {
    MarkKind.BACKWARD: ("backward", ("saved", "parameters", "copies", "held")),
    MarkKind.OPTIMIZER_STEP: ("optimizer step", ("gradients", "optimizer state")),
}


def of_memfit(trace, attribution):
    """Return memfit's figures at the backwards and optimizer steps of the ground truth."""
    found = {"backward": [], "optimizer step": [], "end": [of_workspaces(trace, attribution)]}
    for mark in trace.marks:
        if mark.kind in MOMENTS:
            moment, names = MOMENTS[mark.kind]
            sizes = bytes_of(attribution, mark.position - 1)
            found[moment].append({name: sizes[name] for name in names})
    return found


def of_workspaces(trace, attribution):
    """Return the bytes of cuBLAS's workspaces, and of the largest other one in a forward."""
    of_cublas = np.array([tensor.name == "cuBLAS workspace" for tensor in (*trace.tensors, NO_TENSOR)])
    cublas = of_cublas[attribution.tensor]
    forward = attribution.phase == tuple(Phase).index(Phase.FORWARD)
    workspace = (attribution.category == Category.WORKSPACE) & forward & ~cublas
    return {
        "cuBLAS workspaces": int(attribution.block[cublas].sum()),
        "largest workspace of a convolution": int(attribution.block[workspace].max(initial=0)),
    }


def bytes_of(attribution, event):
    """Return the live requested bytes by kind, at an event."""
    alive = attribution.alive(event)
    category, requested = attribution.category[alive], attribution.requested[alive]
    return {name: int(requested[category == kind].sum()) for name, kind in KINDS.items()}


def both(folder, script, *arguments, options=()):
    """Run a script under memfit and under the ground truth; return the trace and the truth."""
    kept, truth = folder / "run.memfit", folder / "truth.json"
    command = ("dry-run", "--memory", "1TiB", *options)
    for more in (
        ("-o", kept, "--", script),
        ("--no-labels", "--", SUPPORT / "attribution_truth.py", truth, script),
    ):
        done = warm_process.memfit(*map(str, (*command, *more, *arguments)), cwd=folder)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return memfit.read(kept), json.loads(truth.read_text())


def check(folder, script, *arguments, options=()):
    trace, truth = both(folder, script, *arguments, options=options)
    line = memory_timeline(trace)
    attribution = attribute_allocations(trace, line)
    ours = of_memfit(trace, attribution)
    differences = [
        f"{moment} {number + 1}: {name} {one[name]:,}, truth {other[name]:,}"
        for moment in ours
        for number, (one, other) in enumerate(zip(ours[moment], truth[moment], strict=False))
        for name in one.keys() & other.keys()  # the last step ends the run before the hook reads its state
        if one[name] != other[name]
    ]
    assert differences == []
    assert all(ours.values())
    at_peak = breakdown_at(trace, line, attribution, int(np.argmax(line.allocated)))
    unknown = ("unknown", "before the history")
    assert [row for row in at_peak.rows[GroupBy.CATEGORY] if row.name in unknown and row.bytes] == []
    for event in np.linspace(0, len(trace.events) - 1, 50).astype(int).tolist():
        for rows in breakdown_at(trace, line, attribution, event).rows.values():
            assert sum(row.bytes for row in rows) == int(line.allocated[event])
    return ours


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_owners_of_an_examples_memory_are_those_of_its_objects(example, tmp_path):
    ours = check(tmp_path, ROOT / f"examples/{example}.py")
    if example in ("gan", "amp_gradscaler"):
        assert len(ours["backward"]) >= 3
        assert ours["backward"][-1]["saved"] > 1 << 20


@pytest.mark.parametrize("example", DISTRIBUTED)
def test_the_owners_of_the_first_of_eight_ranks_are_those_of_its_objects(example, tmp_path):
    check(tmp_path, ROOT / f"examples/distributed/{example}.py", options=RANKS)


@pytest.mark.parametrize("job", JOBS)
def test_copies_quantised_weights_and_workspaces_have_their_own_rows(job, tmp_path):
    if JOBS[job] and find_spec(JOBS[job]) is None:
        pytest.skip(f"{JOBS[job]} is not installed")
    script, *arguments = job.split()
    check(tmp_path, SUPPORT / "attribution_jobs" / script, *arguments)
