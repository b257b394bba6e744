"""Check the smallest GPU that memfit reports for a job: the job fits on it, and with 2 MiB less it does not.

    python benchmarks/allocator_capacity.py [--jobs 10] [--json FILE]

The benchmark dry-runs each job with PyTorch's default settings and replays the trace under one of four
settings, in turn, to find the smallest capacity. Then it dry-runs the job under that setting with enough
memory, with exactly that capacity, and with 2 MiB less. Exits with 1 if a run contradicts the replay.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from measuring import EXAMPLES, MIB, at_least_1, command_line, write_json

import memfit

JOBS = (
    ("gan.py", "--steps", "3"),
    ("gpt.py", "--steps", "3"),
    ("resnet50.py", "--images", "96"),
    ("accumulation.py", "--steps", "3"),
    ("checkpointed.py", "--steps", "3"),
    ("amp_gradscaler.py", "--steps", "3"),
    ("mlp.py", "--epochs", "1"),
    ("vit_l16.py", "--steps", "3"),
    ("hf_trainer.py", "--steps", "3"),
    ("unet.py", "--steps", "3"),
    ("lstm.py", "--steps", "3"),
    ("masked.py",),
)
CONFS = ("", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:8")


def dry_run(folder: Path, job: tuple[str, ...], conf: str, memory: int | None, trace: Path | None) -> dict:
    """Return the JSON report of ``memfit dry-run``."""
    answer = folder / "answer.json"
    command = [sys.executable, "-m", "memfit", "dry-run", "--steps", "1000", "--json", str(answer)]
    command += ["--memory", str(memory)] if memory is not None else []
    command += ["-o", str(trace)] if trace is not None else []
    subprocess.run(
        [*command, "--", str(EXAMPLES / job[0]), *job[1:]],
        env={**os.environ, "PYTORCH_ALLOC_CONF": conf},
        capture_output=True,
        check=False,
    )
    return json.loads(answer.read_text())


def outcome(answer: dict) -> str:
    """Return ``fits`` for a run in which no allocation failed; otherwise its verdict.

    A workspace of cuDNN that fails, and that PyTorch does without, counts: the replay repeats the requests.
    """
    if answer["out_of_memory"] is not None:
        return f"failed, {answer['verdict']}"
    without = any("workspaces that cuDNN suggested did not fit" in note["text"] for note in answer["notes"])
    return "failed, a workspace" if without else "fits"


def main() -> int:
    """Print a row per job; return 1 if any prediction was wrong."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("--jobs", type=at_least_1, default=10, help="number of jobs")
    arguments = parser.parse_args()
    rows = []
    for job, conf in zip(JOBS[: arguments.jobs], itertools.cycle(CONFS), strict=False):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            trace = folder / "run.memfit"
            dry_run(folder, job, "", None, trace)
            compared = memfit.replay(memfit.read(trace), [conf], smallest=True)
            row = next(row for row in compared.outcomes if row.setting.conf == conf)
            roomy = dry_run(folder, job, conf, None, None)
            at_capacity = dry_run(folder, job, conf, row.smallest, None)
            below = dry_run(folder, job, conf, row.smallest - 2 * MIB, None)
        rows.append(
            {
                "job": " ".join(job),
                "conf": conf,
                "smallest": row.smallest,
                "peak_equal": roomy["peak"]["reserved"] == row.replay.peak_reserved,
                "at_capacity": outcome(at_capacity),
                "below": outcome(below),
            }
        )
        rows[-1]["as_predicted"] = (
            rows[-1]["peak_equal"] and outcome(at_capacity) == "fits" and outcome(below) != "fits"
        )
        print(
            f"{' '.join(job):30} {conf or 'default':26} {row.smallest:>15,} B: {outcome(at_capacity):5}"
            f"  2 MiB below: {outcome(below):21} peak {'equal' if rows[-1]['peak_equal'] else 'DIFFERS'}",
            flush=True,
        )
    good = sum(row["as_predicted"] for row in rows)
    print(f"{good} of {len(rows)} as predicted")
    write_json(arguments.json, rows)
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
