"""Measure how long ``memfit explain`` takes, as a whole process.

    python benchmarks/explain_speed.py [--runs 5] [--steps 330] [--json FILE]

The traces are a GPT of GPT-2 small's size (examples/gpt.py, three steps) and one of about a million events
(more steps of the same script). For each, the benchmark reports the median time and the peak memory of
``memfit explain``, its JSON, and the HTML report. ``html_speed.py`` measures how fast the page opens in a
browser.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import EXAMPLES, GIB, MEMFIT, MIB, command_line, measured, traced, write_json

import memfit

COMMANDS = {"explain": (), "explain --json": ("--json", "-"), "explain --html": ("--html", "report.html")}
LIMITS = {("small", "explain"): 1.0, ("small", "explain --html"): 2.0, ("large", "explain --html"): 15.0}
"""Seconds."""
MOST = 2 * GIB
"""Largest allowed peak memory for the large trace, in bytes."""


def main() -> int:
    """Measure and print a row per command; return 1 if one exceeds its limits."""
    parser = command_line(__doc__, results=True)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument(
        "--steps",
        type=int,
        default=330,
        help="steps of the large trace (330: a million events)",
    )
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for size, steps, runs in (("small", 3, arguments.runs), ("large", arguments.steps, 3)):
            trace, report = Path(folder, f"{size}.memfit"), str(Path(folder, "report.html"))
            traced("--steps", f"{steps}", "--", str(EXAMPLES / "gpt.py"), "--steps", f"{steps}", trace=trace)
            events = len(memfit.read(trace).events)
            for name, options in COMMANDS.items():
                words = [report if word == "report.html" else word for word in options]
                taken = [measured([*MEMFIT, "explain", str(trace), *words]) for _ in range(runs)]
                seconds = statistics.median(one.seconds for one in taken)
                most = max(one.host_bytes for one in taken)
                limit = LIMITS.get((size, name), float("inf"))
                slow = seconds > limit or (size == "large" and most > MOST)
                row = {"trace": size, "events": events, "command": name, "seconds": seconds, "bytes": most}
                rows.append(row | {"too much": slow})
                print(
                    f"{events:10,} events  {name:15} {seconds:6.2f} s  {most / MIB:7.0f} MiB"
                    f"{'  OVER THE LIMIT' * slow}",
                    flush=True,
                )
    write_json(arguments.json, rows)
    return int(any(row["too much"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
