"""Find the largest batch size of scripts, and check both ends of each answer with dry runs of their own.

    python benchmarks/max_batch.py [--share 1.5] [SCRIPT ...]

The budget is ``--share`` times what each script needs as written, rounded up to MiB. Checked: a dry run with
that budget fits with the largest batch size, and runs out of memory with the next.
"""

import sys
import time
from pathlib import Path

from measuring import GIB, MIB, ROOT, command_line, table_head, table_line

import memfit
from memfit import MemfitError
from memfit.records import BatchLimit

SCRIPTS = ("gpt", "resnet50", "unet", "hf_trainer", "lstm")


def main() -> None:
    """Print a row for each script, and exit with 1 if an answer is wrong."""
    parser = command_line(__doc__)
    parser.add_argument("scripts", nargs="*", default=[f"examples/{name}.py" for name in SCRIPTS])
    parser.add_argument("--share", type=float, default=1.5)
    options = parser.parse_args()
    columns = "script", "budget", "as written", "largest", "needs", "next", "sizes run", "seconds"
    print(table_head(columns, "lrrrrrrr"))
    wrong = [fault for script in options.scripts for fault in row(ROOT / script, options.share)]
    for fault in wrong:
        print(f"WRONG: {fault}", file=sys.stderr)
    sys.exit(bool(wrong))


def row(script: Path, share: float) -> list[str]:
    """Print the row of a script, and return what is wrong about it."""
    written = memfit.dry_run(script, stdout_to_stderr=True)
    budget = int(share * written.peak_process.bytes) // MIB * MIB + MIB
    started = time.monotonic()
    try:
        found = memfit.max_batch(script, budget=budget)
    except MemfitError as error:
        print(f"| {script.stem} | not found: {error} |")
        return [f"{script.stem}: {error}"]
    seconds = time.monotonic() - started
    if found.largest is None or found.limit is not BatchLimit.MEMORY:
        return [f"{script.stem}: largest {found.largest}, limited by {found.limit}"]
    fits = found.run(found.largest)
    out = found.run(found.largest + 1)
    if fits is None or out is None:
        return [f"{script.stem}: {found.largest} and the next have not both run"]
    needs = (f"{run.needs.bytes / GIB:.2f}" for run in (fits, out))
    sizes = f"{budget / GIB:.2f} GiB", found.as_written, fits.size
    print(table_line((script.stem, *sizes, *needs, len(found.runs), f"{seconds:.0f}")), flush=True)
    option = found.how.split()[0]
    wrong = []
    for run in (fits, out):
        again = memfit.dry_run(script, [option, str(run.size)], memory=budget, stdout_to_stderr=True)
        if (again.verdict in ("fits", "tight")) is not run.fits:
            wrong.append(f"{script.stem} with batch size {run.size}: a dry run says {again.verdict}")
    return wrong


if __name__ == "__main__":
    main()
