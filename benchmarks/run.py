"""List the benchmarks, or run one.

    python benchmarks/run.py                       the table
    python benchmarks/run.py NAME [ARGUMENTS]      a benchmark; NAME --help shows its options

Each is a script that also runs by itself: ``python benchmarks/NAME.py``. docs/benchmarks.md has the figures.
"""

import sys
from pathlib import Path
from subprocess import run
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
CARD = "a GPU"
"""What the benchmarks of gpu/ need; with ``--rehearse GPU`` the ghost stands in for it."""


class Benchmark(NamedTuple):
    """A line of the table."""

    name: str
    """Of its script, without the ending."""
    minutes: int
    """About so many, on two processors with nothing beside it."""
    shows: str
    needs: str = ""
    """What it cannot run without, beside what memfit's tests need."""


BENCHMARKS = (
    Benchmark("accuracy", 60, "dry runs against figures that others published for real cards"),
    Benchmark("aliases", 1, "which values of a graph share memory, and when, against a real run"),
    Benchmark("allocator_speed", 1, "replays against PyTorch's own allocator: requests per second"),
    Benchmark("arena_cpu", 4, "training in memfit.arena on the CPU: time, and the process's peak"),
    Benchmark("arena_ghost", 3, "training in memfit.arena on the ghost: the GPU's memory in use"),
    Benchmark("chunked_head", 1, "ChunkedHead beside the plain head and PyTorch's operation: time and peak"),
    Benchmark("cudnn_versions", 30, "cuDNN's answers by version, for published jobs", "6 GB of wheels"),
    Benchmark("dry_run_speed", 6, "dry runs relative to `import torch`: time and host memory"),
    Benchmark("engine_arena", 2, "memfit.Engine with Caffe's mem_param: the process's peak"),
    Benchmark("engine_overhead", 5, "memfit.Engine against hand-written loops: time of a step"),
    Benchmark("engines", 30, "Megatron-LM and torchtitan, rank by rank", "a clone of one of them"),
    Benchmark("equality", 20, "strategies against hand-written loops on random networks, bit for bit"),
    Benchmark("foreign_plans", 60, "scripts of others under plans: verified, and trained", "their clones"),
    Benchmark("fit_kernel_times", 8, "coefficients of kernels' times, fitted again", "public tables"),
    Benchmark("timm_training", 15, "timm models on a card and on the ghost, by batch", "a public table"),
    Benchmark("forked_runs", 15, "runs that share the script's start against whole runs: traces, time"),
    Benchmark("host_times", 5, "the host's time for training steps, as counted and as measured"),
    Benchmark("html_speed", 1, "the HTML report in a browser: time to draw and to answer", "Chromium"),
    Benchmark("library_scripts", 10, "scripts in the idiom of twelve libraries: every row of the report"),
    Benchmark("ops", 10, "PyTorch's database of operators on the ghost: outcomes"),
    Benchmark("packing", 5, "offsets of buffers relative to their lower bound"),
    Benchmark("parallel_modes", 20, "every parallel mode of PyTorch, as some ranks of a job"),
    Benchmark("planning", 30, "memfit plan under one budget after another: what plans promise"),
    Benchmark("planning_time", 2, "the planner alone: seconds to build and to solve a program"),
    Benchmark("plans_on_cpu", 30, "plans and micro-batches on the CPU: time, measured and predicted"),
    Benchmark("ranks", 2, "dry runs of 64 GPUs and of a pipeline: time and host memory"),
    Benchmark("seed_table", 1, "memory and time of RetinaNet under MMDetection's settings"),
    Benchmark("times", 60, "step times that others published for real cards, beside memfit's"),
    Benchmark("torch_versions", 15, "memfit with other versions of PyTorch; make test-versions runs all"),
    Benchmark("watch_overhead", 1, "what memfit.watch costs per step"),
    Benchmark("gpu/ghost_today", 5, "the ghost of today beside what validate measured on cards earlier"),
    Benchmark("gpu/nccl", 1, "what NCCL takes of its own, beside the rule of dry runs", "several GPUs"),
    Benchmark("gpu/operators", 3, "memory that operators request, on the card and on the ghost", CARD),
    Benchmark("gpu/operators_today", 5, "the ghost of today beside what operators measured earlier"),
    Benchmark("gpu/plans", 4, "training under plans: peaks, times and losses against the plans", CARD),
    Benchmark("gpu/validate", 9, "whole scripts on the card and on the ghost: memory and events", CARD),
)


def listed() -> str:
    """Return the table."""
    lines = [f"{'name':20} {'minutes':>7}  {'needs':15} shows"]
    lines += [f"{each.name:20} {each.minutes:7}  {each.needs:15} {each.shows}" for each in BENCHMARKS]
    return "\n".join(lines)


def main() -> int:
    """Print the table, or run a benchmark and return its exit code."""
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(f"{__doc__}\n{listed()}")
        return 0
    name, *arguments = sys.argv[1:]
    if name not in {each.name for each in BENCHMARKS}:
        print(f"No benchmark is named {name!r}. There are:\n\n{listed()}", file=sys.stderr)
        return 2
    return run([sys.executable, str(HERE / f"{name}.py"), *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
