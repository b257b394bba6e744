"""Check memfit's attribution of memory against an independent ground truth, for each example and job.

    python benchmarks/attribution.py [SCRIPT.py ...] [--json FILE]

Each script runs twice on the ghost: once under memfit, once under ``attribution_truth.py``. At every backward
and optimizer step, both must report the same requested bytes. The benchmark also limits the unknown share of
the peak, and checks that all rows sum to the allocated bytes. Exits with 1 if anything differs.
"""

import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from measuring import ROOT, command_line, write_json

import memfit
from memfit.allocator.timeline import timeline
from memfit.analysis.attribution import attribute
from memfit.analysis.breakdown import breakdown_at
from memfit.records import Attribution, Category, GroupBy, MarkKind, Phase, TensorInfo, Trace

EXAMPLES = (
    *(
        "accumulation",
        "amp_gradscaler",
        "checkpointed",
        "ctc",
        "gan",
        "gpt",
        "gru",
        "hf_trainer",
        "linear1024",
    ),
    *("lora", "lstm", "masked", "mlp", "resnet50", "retinanet", "unet", "vit_l16"),
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
"""Scripts in ``attribution_jobs/`` with their arguments, and the package that each needs."""
DISTRIBUTED = (
    *("checkpoint", "context_parallel", "ddp", "expert_parallel", "fsdp1", "fsdp2", "hsdp", "pipeline"),
    *("tensor_parallel", "zero1"),
)
"""Scripts in ``examples/distributed``: each runs as the first of eight ranks."""
RANKS = ["--gpu", "H100", "--nproc", "8"]
KINDS = {
    "saved": Category.ACTIVATION,
    "parameters": Category.PARAMETER,
    "gradients": Category.GRADIENT,
    "optimizer state": Category.OPTIMIZER_STATE,
    "copies": Category.COPY,
    "held": Category.HELD,
}
NO_TENSOR = TensorInfo("", "", "", ())  # last, where index -1 finds it
UNKNOWN = 0.01  # the largest allowed share of the peak


def of_memfit(trace: Trace, attribution: Attribution) -> dict[str, list[dict[str, int]]]:
    """Return memfit's figures at the backwards and optimizer steps of the ground truth."""
    found = {"backward": [], "optimizer step": [], "end": [of_workspaces(trace, attribution)]}
    for mark in trace.marks:
        if mark.kind is MarkKind.BACKWARD:
            sizes = bytes_of(attribution, mark.position - 1)
            found["backward"].append(
                {name: sizes[name] for name in ("saved", "parameters", "copies", "held")}
            )
        if mark.kind is MarkKind.OPTIMIZER_STEP:
            sizes = bytes_of(attribution, mark.position - 1)
            found["optimizer step"].append({name: sizes[name] for name in ("gradients", "optimizer state")})
    return found


def of_workspaces(trace: Trace, attribution: Attribution) -> dict[str, int]:
    """Return the bytes of cuBLAS's workspaces, and of the largest other one in a forward."""
    of_cublas = np.array([tensor.name == "cuBLAS workspace" for tensor in (*trace.tensors, NO_TENSOR)])
    cublas = of_cublas[attribution.tensor]
    forward = attribution.phase == tuple(Phase).index(Phase.FORWARD)
    workspace = (attribution.category == Category.WORKSPACE) & forward & ~cublas
    return {
        "cuBLAS workspaces": int(attribution.block[cublas].sum()),
        "largest workspace of a convolution": int(attribution.block[workspace].max(initial=0)),
    }


def bytes_of(attribution: Attribution, event: int) -> dict[str, int]:
    """Return the live requested bytes by kind, at an event."""
    alive = attribution.alive(event)
    category = attribution.category[alive]
    requested = attribution.requested[alive]
    return {name: int(requested[category == kind].sum()) for name, kind in KINDS.items()}


def run(options: list[str], script: list[str]) -> None:
    """Run a script on the ghost, as a rank if it is one of those in ``examples/distributed``."""
    ranks = RANKS * any("examples/distributed" in argument for argument in script)
    command = [sys.executable, "-m", "memfit", "dry-run", "--memory", "1TiB", *ranks, *options, "--", *script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def compare(script: Path, folder: Path, *arguments: str) -> dict[str, object]:
    """Run a script both ways and return the differences."""
    kept, truth = folder / "run.memfit", folder / "truth.json"
    for path in (kept, truth):
        path.unlink(missing_ok=True)
    command = [str(script), *arguments]
    run(["-o", str(kept)], command)
    run(["--no-labels"], [str(ROOT / "benchmarks/attribution_truth.py"), str(truth), *command])
    trace = memfit.read(kept)
    line = timeline(trace)
    attribution = attribute(trace, line)
    ours, theirs = of_memfit(trace, attribution), json.loads(truth.read_text())
    differences = [
        f"{kind} {number + 1}: {name} {one[name]:,}, truth {other[name]:,}"
        for kind in ours
        for number, (one, other) in enumerate(zip(ours[kind], theirs[kind], strict=False))
        for name in one.keys() & other.keys()  # the last step ends the run before the hook reads its state
        if one[name] != other[name]
    ]
    differences += [
        f"{kind}: {len(ours[kind])} of {len(theirs[kind])} seen" for kind in ours if not ours[kind]
    ]
    peak = int(np.argmax(line.allocated))
    at_peak = breakdown_at(trace, line, attribution, peak)
    unknown = sum(
        row.bytes for row in at_peak.rows[GroupBy.CATEGORY] if row.name in ("unknown", "before the history")
    )
    for event in np.linspace(0, len(trace.events) - 1, 50).astype(int).tolist():
        rows = breakdown_at(trace, line, attribution, event).rows
        differences += [
            f"event {event}: rows by {by} do not sum to the allocated bytes"
            for by in rows
            if sum(row.bytes for row in rows[by]) != int(line.allocated[event])
        ]
    if unknown > UNKNOWN * at_peak.allocated:
        differences.append(f"unknown: {unknown:,} of {at_peak.allocated:,}")
    return {
        "example": " ".join((script.name, *arguments)),
        "backwards": len(ours["backward"]),
        "saved at the last": ours["backward"][-1]["saved"] if ours["backward"] else 0,
        "unknown share": unknown / max(at_peak.allocated, 1),
        "differences": differences,
    }


def jobs() -> Iterator[list[str]]:
    """Yield the examples, and the jobs whose packages are installed."""
    yield from ([str(ROOT / f"examples/{one}.py")] for one in EXAMPLES)
    yield from ([str(ROOT / f"examples/distributed/{one}.py")] for one in DISTRIBUTED)
    for job, package in JOBS.items():
        if package and not importlib.util.find_spec(package):
            print(f"{job:26} skipped: {package} is not installed", flush=True)
            continue
        script, *arguments = job.split()
        yield [str(ROOT / "benchmarks/attribution_jobs" / script), *arguments]


def main() -> int:
    """Compare the scripts and print a table; return 1 if anything differs."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("examples", nargs="*", help="scripts, with their arguments (default: all)")
    arguments = parser.parse_args()
    commands = [one.split() for one in arguments.examples] or jobs()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for script, *options in commands:
            found = compare(Path(script), Path(folder), *options)
            results.append(found)
            verdict = "equal" if not found["differences"] else "DIFFERS"
            print(
                f"{found['example']:26} {found['backwards']:3} backwards  "
                f"saved {found['saved at the last']:15,} B  unknown {found['unknown share']:.3%}  {verdict}",
                flush=True,
            )
            for text in found["differences"][:6]:
                print(f"    {text}", flush=True)
    write_json(arguments.json, results)
    return int(any(found["differences"] for found in results))


if __name__ == "__main__":
    sys.exit(main())
