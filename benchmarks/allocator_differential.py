"""Run the same random operations on memfit's allocator and PyTorch's real one, and compare after each.

    python benchmarks/allocator_differential.py [--operations 50000] [--seed N] [--json FILE]

The operations use sizes around every threshold, one to four streams with recorded uses, and private pools, on
devices from mostly free to always full, under every setting alone and in pairs. After each operation every
address, allocated, reserved and every other figure of torch.cuda.memory_stats() must be equal, and at the end
every block of every segment. No GPU is needed: the real allocator runs on the ghost. Exits with 1 if anything
differs. --seed repeats a run.
"""

import itertools
import json
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measuring import GIB, at_least_1, command_line, write_json

from memfit.report.terminal.progress_line import progress_line

DRIVER = Path(__file__).with_name("allocator") / "drive.py"
Options = dict[str, Any]

# Setting -> values to test. A conf combines values of one or two settings.
SETTINGS = {
    "expandable_segments": ("expandable_segments:True",),
    "max_split_size_mb": ("max_split_size_mb:20", "max_split_size_mb:64", "max_split_size_mb:200"),
    "max_non_split_rounding_mb": ("max_split_size_mb:64,max_non_split_rounding_mb:128",),
    "large_segment_size_mb": ("large_segment_size_mb:12", "large_segment_size_mb:48"),
    "roundup_power2_divisions": (
        "roundup_power2_divisions:1",
        "roundup_power2_divisions:8",
        "roundup_power2_divisions:[1:2,8:4,64:8,>:2]",
        "roundup_power2_divisions:[256:0,512:2]",
    ),
    "garbage_collection_threshold": ("garbage_collection_threshold:0.6", "garbage_collection_threshold:0.9"),
    "per_process_memory_fraction": ("per_process_memory_fraction:0.7", "per_process_memory_fraction:0.5"),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom:True",),
}
EXCLUDE = {"max_split_size_mb", "max_non_split_rounding_mb"}  # values of the second include the first
REFUSED = (
    "max_split_size_mb:20",
    "large_segment_size_mb:48",
)  # PyTorch refuses a max_split_size below large_segment_size


def situations(dice: random.Random) -> list[tuple[str, Options]]:
    """Return every conf, first single settings and then pairs, each with random options of the driver."""
    alone = ["", *itertools.chain(*SETTINGS.values())]
    pairs = [
        ",".join(dice.choice([pair for pair in both if pair != REFUSED]))
        for first, second in itertools.combinations(SETTINGS, 2)
        if {first, second} != EXCLUDE
        for both in [list(itertools.product(SETTINGS[first], SETTINGS[second]))]
    ]
    return [(conf, _options(dice, conf)) for conf in alone + pairs]


def _options(dice: random.Random, conf: str) -> Options:
    streams = dice.choice((1, 1, 2, 3, 4))
    return {
        "seed": dice.randrange(1 << 30),
        "streams": streams,
        "share": 0.0 if streams == 1 else dice.choice((0.0, 0.1, 0.3)),
        "total": (2 if "throw" in conf else dice.choice((2, 4, 8, 80)))
        * GIB,  # it throws only on a full device
        "live": dice.choice((0.3, 0.6, 0.95)),
        "fraction": dice.choice((None, 0.75, 0.8)) if "fraction" not in conf else None,
        "pools": dice.choice((0, 0, 2)),
    }


def drive(conf: str, options: Options, python: str = sys.executable) -> Options:
    """Run the driver in a separate process; return its result."""
    environment = {**os.environ, **dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), conf)}
    return result_of(
        subprocess.run(
            [python, str(DRIVER), json.dumps(options)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    )


def result_of(done: "subprocess.CompletedProcess[str]") -> Options:
    """Return the result that a process of the driver printed."""
    if done.returncode != 0 and "Unrecognized" in done.stderr:
        return {"operations": 0, "mismatch": "", "unknown": True}  # an older PyTorch lacks the setting
    if done.returncode != 0:
        return {
            "operations": 0,
            "mismatch": "".join(done.stderr.strip().splitlines()[-1:]) or "the driver printed no error",
        }
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Drive every situation and print a table; return 1 if anything differs."""
    parser = command_line(__doc__, results=True)
    parser.add_argument(
        "--operations", type=at_least_1, default=50_000, help="number of operations, over all situations"
    )
    parser.add_argument("--seed", type=int, help="random seed (default: a new one)")
    parser.add_argument(
        "--python", default=sys.executable, help="Python interpreter of an environment with another torch"
    )
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 30) if arguments.seed is None else arguments.seed
    chosen = situations(random.Random(seed))  # noqa: S311 - nothing secret
    each = -(-arguments.operations // len(chosen))
    rows = []
    with ThreadPoolExecutor(os.cpu_count()) as workers, progress_line() as show:
        tasks = [
            workers.submit(drive, conf, options | {"operations": each}, arguments.python)
            for conf, options in chosen
        ]
        for (conf, options), task in zip(chosen, tasks, strict=True):
            rows.append({"conf": conf, **options, **task.result()})
            show(f"{len(rows)} of {len(chosen)} situations")
    table = markdown(rows, seed)
    print(table)
    write_json(arguments.json, {"seed": seed, "rows": rows})
    if arguments.markdown:
        arguments.markdown.write_text(table + "\n")
    return int(any(row["mismatch"] for row in rows))


def markdown(rows: list[Options], seed: int) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| PYTORCH_ALLOC_CONF | GiB | streams | pools | seed | operations | retries | failures | differs |",
        "|---|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    for row in rows:
        conf = f"`{row['conf']}`" if row["conf"] else "default"
        if row["fraction"]:
            conf += f", fraction {row['fraction']}"
        cells = (
            conf,
            row["total"] // GIB,
            row["streams"],
            row["pools"],
            row["seed"],
            f"{row['operations']:,}",
            f"{row.get('retries', 0):,}",
            f"{row.get('outs_of_memory', 0):,}",
            row["mismatch"] or ("this PyTorch lacks the setting" if row.get("unknown") else "no"),
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    differing = sum(bool(row["mismatch"]) for row in rows)
    operations = sum(row["operations"] for row in rows)
    lines += ["", f"Seed {seed}: {operations:,} operations, {differing} of {len(rows)} situations differ."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
