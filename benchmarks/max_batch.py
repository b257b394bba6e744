"""Find the largest batch size of scripts, and check both ends of each answer with dry runs of their own.

    python benchmarks/max_batch.py [--share 1.5] [SCRIPT ...]

The budget is ``--share`` times what each script needs as written, rounded up to MiB. Checked: a dry run with
that budget fits with the largest batch size, and runs out of memory with the next.
"""

import argparse
import sys
import time
from pathlib import Path

from memfit import MemfitError, api
from memfit.records import BatchLimit

SCRIPTS = ("gpt", "resnet50", "unet", "hf_trainer", "lstm")
ROOT = Path(__file__).parents[1]
MIB = 1 << 20


def main() -> None:
    """Print a row for each script, and exit with 1 if an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("scripts", nargs="*", default=[f"examples/{name}.py" for name in SCRIPTS])
    parser.add_argument("--share", type=float, default=1.5)
    options = parser.parse_args()
    print(
        "| script | budget | as written | largest | needs | next | sizes run | seconds |\n"
        "|---|--:|--:|--:|--:|--:|--:|--:|"
    )
    wrong = [fault for script in options.scripts for fault in row(ROOT / script, options.share)]
    for fault in wrong:
        print(f"WRONG: {fault}", file=sys.stderr)
    sys.exit(bool(wrong))


def row(script: Path, share: float) -> list[str]:
    """Print the row of a script, and return what is wrong about it."""
    written = api.dry_run(script, stdout_to_stderr=True)
    budget = int(share * written.peak_process.bytes) // MIB * MIB + MIB
    started = time.monotonic()
    try:
        found = api.max_batch(script, budget=budget)
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
    needs = f"{fits.needs.bytes / 2**30:.2f} | {out.needs.bytes / 2**30:.2f}"
    print(
        f"| {script.stem} | {budget / 2**30:.2f} GiB | {found.as_written} | {fits.size} | "
        f"{needs} | {len(found.runs)} | {seconds:.0f} |",
        flush=True,
    )
    option = found.how.split()[0]
    wrong = []
    for run in (fits, out):
        again = api.dry_run(script, [option, str(run.size)], memory=budget, stdout_to_stderr=True)
        if (again.verdict in ("fits", "tight")) is not run.fits:
            wrong.append(f"{script.stem} with batch size {run.size}: a dry run says {again.verdict}")
    return wrong


if __name__ == "__main__":
    main()
