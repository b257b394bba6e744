"""Measure how long a dry run takes, relative to `import torch` alone, in alternation.

    python benchmarks/dry_run_speed.py [--runs 5] [--json FILE]

Figures are medians over whole processes, of wall time and of processor time, which a busy machine inflates
less. Exits with 1 if a row misses its target.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GIB = 1 << 30


@dataclass(frozen=True)
class Measured:
    """One row of the table."""

    what: str
    seconds: float
    """Median wall time."""
    spread: tuple[float, float]
    """Shortest and longest wall time, in seconds."""
    processor_seconds: float
    """Median processor time, including child processes."""
    host_gib: float
    """Peak resident memory of any one process."""
    times_import: float
    """Median ratio to the `import torch` just before."""
    target_seconds: float | None
    target_gib: float | None

    @property
    def met(self) -> bool:
        """Whether every target of this row is met."""
        return (self.target_seconds is None or self.seconds <= self.target_seconds) and (
            self.target_gib is None or self.host_gib <= self.target_gib
        )


def timed(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, float, int]:
    """Run a command; return wall seconds, processor seconds and the largest peak of a process in bytes."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{command} ended with {process.returncode}")
    seconds = time.perf_counter() - begun
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def dry_run(*arguments: str) -> list[str]:
    """Return the command of a dry run."""
    return [sys.executable, "-m", "memfit", "dry-run", "--json", os.devnull, *arguments]


def measure(
    what: str,
    command: list[str],
    runs: int,
    *,
    cold: bool = False,
    seconds: float | None = None,
    gib: float | None = None,
) -> Measured:
    """Time a command and `import torch`, in alternation."""
    times, processor, ratios, most = [], [], [], 0
    for _ in range(runs):
        alone, _, _ = timed([sys.executable, "-c", "import torch"])
        with tempfile.TemporaryDirectory() as cache:
            took, busy, held = timed(command, {"MEMFIT_CACHE": cache} if cold else None)
        times.append(took)
        processor.append(busy)
        ratios.append(took / alone)
        most = max(most, held)
    return Measured(
        what,
        statistics.median(times),
        (min(times), max(times)),
        statistics.median(processor),
        most / GIB,
        statistics.median(ratios),
        seconds,
        gib,
    )


def main() -> int:
    """Measure every row, print the table, and return 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    gpt, llama = str(ROOT / "examples/gpt.py"), str(ROOT / "examples/llama7b.py")
    compiled = [str(ROOT / "examples/compiled_gpt.py"), "--layers", "12"]
    timed(dry_run(gpt))  # builds the ghost, warms the page cache
    rows = [
        measure("memfit --help", [sys.executable, "-m", "memfit", "--help"], arguments.runs),
        measure("GPT-2 small, 3 steps", dry_run(gpt), arguments.runs, seconds=8),
        measure(
            "GPT-2 small, ghost built cold",
            dry_run(gpt),
            max(1, arguments.runs // 2),
            cold=True,
            seconds=8 + 15,
        ),
        measure(
            "7 B Llama built on the CPU, 160 GiB, 3 steps",
            dry_run("--memory", "160GiB", llama),
            arguments.runs,
            seconds=15,
            gib=2,
        ),
        measure(
            "7 B Llama on an A100-80GB (out of memory)",
            dry_run("--gpu", "A100-80GB", llama),
            arguments.runs,
            seconds=15,
            gib=2,
        ),
        measure(
            "GPT-2 small compiled, empty cache",
            dry_run(*compiled),
            max(1, arguments.runs // 2 + 1),
            cold=True,
            seconds=40,
        ),
        measure("GPT-2 small compiled, warm cache", dry_run(*compiled), max(1, arguments.runs // 2)),
    ]
    print(f"{'':46} {'median':>8} {'min-max':>13} {'processor':>11} {'x import':>9} {'host':>9}  target")
    for row in rows:
        target = " and ".join(
            f"≤ {value:g} {unit}"
            for value, unit in ((row.target_seconds, "s"), (row.target_gib, "GiB"))
            if value is not None
        )
        verdict = (target or "none") + ("" if row.met else "  MISSED")
        print(
            f"{row.what:46} {row.seconds:6.2f} s {row.spread[0]:5.2f}-{row.spread[1]:5.2f} s "
            f"{row.processor_seconds:9.2f} s "
            f"{row.times_import:8.2f}x {row.host_gib:5.2f} GiB  {verdict}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    return 0 if all(row.met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
