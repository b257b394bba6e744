"""Measure how long a dry run takes, relative to `import torch` alone, in alternation.

    python benchmarks/dry_run_speed.py [--runs 5] [--json FILE]

Figures are medians over whole processes, of wall time and of processor time, which a busy machine inflates
less. Exits with 1 if a row misses its target.
"""

import os
import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass

from measuring import EXAMPLES, GIB, MEMFIT, at_least_1, command_line, measured, write_json

GPT, LLAMA = str(EXAMPLES / "gpt.py"), str(EXAMPLES / "llama7b.py")
COMPILED = (str(EXAMPLES / "compiled_gpt.py"), "--layers", "12")


@dataclass(frozen=True)
class SpeedRow:
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


def dry_run(*arguments: str) -> list[str]:
    """Return the command of a dry run."""
    return [*MEMFIT, "dry-run", "--json", os.devnull, *arguments]


def measure(
    what: str,
    command: list[str],
    runs: int,
    *,
    cold: bool = False,
    seconds: float | None = None,
    gib: float | None = None,
) -> SpeedRow:
    """Time a command and `import torch`, in alternation; ``cold`` gives each run an empty cache."""
    times, processor, ratios, most = [], [], [], 0
    for _ in range(runs):
        alone = measured([sys.executable, "-c", "import torch"])
        with tempfile.TemporaryDirectory() as cache:
            run = measured(command, {"MEMFIT_CACHE": cache} if cold else None)
        times.append(run.seconds)
        processor.append(run.processor_seconds)
        ratios.append(run.seconds / alone.seconds)
        most = max(most, run.host_bytes)
    return SpeedRow(
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
    parser = command_line(__doc__, results=True)
    parser.add_argument("--runs", type=at_least_1, default=5)
    arguments = parser.parse_args()
    runs, few = arguments.runs, max(1, arguments.runs // 2)
    measured(dry_run(GPT))  # builds the ghost, warms the page cache
    on_a100 = dry_run("--gpu", "A100-80GB", LLAMA)
    with_160gib = dry_run("--memory", "160GiB", LLAMA)
    rows = [
        measure("memfit --help", [*MEMFIT, "--help"], runs),
        measure("GPT-2 small, 3 steps", dry_run(GPT), runs, seconds=8),
        measure("GPT-2 small, ghost built cold", dry_run(GPT), few, cold=True, seconds=8 + 15),
        measure("7 B Llama built on the CPU, 160 GiB, 3 steps", with_160gib, runs, seconds=15, gib=2),
        measure("7 B Llama on an A100-80GB (out of memory)", on_a100, runs, seconds=15, gib=2),
        measure(
            "GPT-2 small compiled, empty cache", dry_run(*COMPILED), runs // 2 + 1, cold=True, seconds=40
        ),
        measure("GPT-2 small compiled, warm cache", dry_run(*COMPILED), few),
    ]
    print(f"{'':46} {'median':>8} {'min-max':>13} {'processor':>11} {'x import':>9} {'host':>9}  target")
    for row in rows:
        limits = ((row.target_seconds, "s"), (row.target_gib, "GiB"))
        target = " and ".join(f"≤ {value:g} {unit}" for value, unit in limits if value is not None)
        print(
            f"{row.what:46} {row.seconds:6.2f} s {row.spread[0]:5.2f}-{row.spread[1]:5.2f} s "
            f"{row.processor_seconds:9.2f} s {row.times_import:8.2f}x {row.host_gib:5.2f} GiB  "
            f"{target or 'none'}{'' if row.met else '  MISSED'}"
        )
    write_json(arguments.json, [asdict(row) for row in rows])
    return int(not all(row.met for row in rows))


if __name__ == "__main__":
    sys.exit(main())
