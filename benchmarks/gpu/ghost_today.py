"""Compare the ghost of today with what validate.py measured on a card earlier. No GPU is needed.

    python benchmarks/gpu/ghost_today.py                   the jobs of every card in results/, some minutes
    python benchmarks/gpu/ghost_today.py --only LSTM gan

validate.py compares a card with the ghost of that day. This script runs the same jobs on the ghost again,
with the card's profile and memory, and prints a table: what the card held, and how far off the ghost was then
and is now. The card's versions of PyTorch and cuDNN are those of that day, the ghost's the installed ones.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from card_session import chosen
from measuring import command_line, table_head, table_line
from table import difference, mib
from validate import HERE, ROOT, STEPS, ValidationJob, environment, jobs, quiet

import memfit
from memfit.errors import MemfitError

COMPARED = ("allocated", "reserved")
HEADINGS = ("job", *(cell for name in COMPARED for cell in (f"{name}, MiB", "ghost then", "today")))


def row(job: ValidationJob, result: Mapping[str, Any]) -> str:
    """Run a job on the ghost and return its line of the table."""
    card, before = (result["jobs"][job.name][side] for side in ("card", "ghost"))
    try:
        with environment(job.environment):
            run = memfit.dry_run(
                ROOT / job.script,
                job.arguments,
                gpu=result["profile"],
                memory=result["context"]["total"],
                steps=STEPS,
            )
    except MemfitError as error:
        return table_line((job.name, f"failed: {str(error).splitlines()[0]}", *[""] * (len(HEADINGS) - 2)))
    now = {"allocated": run.peak_allocated, "reserved": run.peak_reserved}
    cells = (
        (mib(card[name]), *(difference(ghost[name], card[name]) for ghost in (before, now)))
        for name in COMPARED
    )
    return table_line((job.name, *chain.from_iterable(cells)))


def table(result: Mapping[str, Any], these: list[ValidationJob]) -> Iterator[str]:
    """Yield the lines of one card's table, each as soon as its job has run."""
    card, driver, version, day = (result[name] for name in ("card", "driver", "torch", "day"))
    yield f"**{card}**, driver {driver}, torch {version}, measured {day}:\n"
    yield table_head(HEADINGS, "l" + "r" * (len(HEADINGS) - 1))
    measured = result["jobs"]
    for job in these:
        if measured.get(job.name, {}).get("status") == "done":
            yield row(job, result)


def main() -> int:
    """Print a table per card; return 1 if a job failed."""
    parser = command_line(__doc__)
    parser.add_argument("--only", nargs="+", metavar="JOB", help="run only these jobs")
    options = parser.parse_args()
    these = chosen(jobs(), options.only, "jobs.toml")
    contents = [msgspec.json.decode(path.read_bytes()) for path in sorted((HERE / "results").glob("*.json"))]
    failed = False
    with (
        os.fdopen(os.dup(1), "w", buffering=1) as terminal,
        tempfile.TemporaryDirectory(prefix="memfit-ghost-today-") as scratch,
    ):
        os.chdir(scratch)
        with quiet(Path(scratch) / "ghost_today"):
            for result in contents:
                for line in table(result, these) if "jobs" in result else ():
                    failed |= "| failed: " in line
                    print(line, file=terminal)
        os.chdir(ROOT)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
