"""Measure how long ``memfit explain`` takes, as a whole process.

    python benchmarks/explain_speed.py [--runs 5] [--steps 330] [--json FILE]

The traces are a GPT of GPT-2 small's size (examples/gpt.py, three steps) and one of about a million events
(more steps of the same script). For each, the benchmark reports the median time and the peak memory of
``memfit explain``, its JSON, and the HTML report. ``html_speed.py`` measures how fast the page opens in a
browser.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from memfit import api

EXAMPLE = Path(__file__).parents[1] / "examples" / "gpt.py"
COMMANDS = {"explain": (), "explain --json": ("--json", "-"), "explain --html": ("--html", "report.html")}
LIMITS = {("small", "explain"): 1.0, ("small", "explain --html"): 2.0, ("large", "explain --html"): 15.0}
"""Seconds."""
MOST = 2 << 30
"""Largest allowed peak memory for the large trace, in bytes."""


def measured(trace: Path, options: tuple[str, ...]) -> tuple[float, int]:
    """Run ``memfit explain``; return its seconds and the peak memory of the process in bytes."""
    command = [sys.executable, "-m", "memfit", "explain", str(trace), *options]
    begin = time.perf_counter()
    child = subprocess.Popen(command, cwd=trace.parent, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - begin
    if status:
        raise SystemExit(f"{' '.join(command)}: exit status {os.waitstatus_to_exitcode(status)}")
    return seconds, used.ru_maxrss * 1024


def record(trace: Path, steps: int) -> None:
    """Record the example for a number of steps and discard its output."""
    command = [sys.executable, "-m", "memfit", "dry-run", "--steps", str(steps), "-o", str(trace)]
    subprocess.run([*command, "--", str(EXAMPLE), "--steps", str(steps)], capture_output=True, check=True)


def main() -> int:
    """Measure and print a row per command; return 1 if one exceeds its limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--steps",
        type=int,
        default=330,
        help="training steps of the large trace (330 give about a million events)",
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for size, steps, runs in (("small", 3, arguments.runs), ("large", arguments.steps, 3)):
            trace = Path(folder) / f"{size}.memfit"
            record(trace, steps)
            events = len(api.read(trace).events)
            for name, options in COMMANDS.items():
                taken = [measured(trace, options) for _ in range(runs)]
                seconds, most = statistics.median(one for one, _ in taken), max(bytes_ for _, bytes_ in taken)
                limit = LIMITS.get((size, name), float("inf"))
                slow = seconds > limit or (size == "large" and most > MOST)
                rows.append(
                    {"trace": size, "events": events, "command": name, "seconds": seconds, "bytes": most}
                )
                print(
                    f"{events:10,} events  {name:15} {seconds:6.2f} s  {most / 2**20:7.0f} MiB"
                    f"{'  OVER THE LIMIT' * slow}",
                    flush=True,
                )
                rows[-1]["too much"] = slow
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return int(any(row["too much"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
