"""Run every training script under examples/ with `memfit dry-run --whole`, beside the plain dry run.

    python benchmarks/whole_runs.py [SCRIPT.py ...]

Checked: the script ends by itself in 60 seconds, and its training allocates at most what a plain dry run of
as many steps does, to the byte.
"""

import sys
import time
from pathlib import Path

from measuring import EXAMPLES, command_line, table_head, table_line

from memfit import MemfitError, dry_run
from memfit.records import DryRun, Stage
from memfit.run.options import STEPS

LIMIT = 60.0


def main() -> None:
    """Print a row for each script, and exit with 1 if a promise is broken."""
    parser = command_line(__doc__)
    parser.add_argument("scripts", nargs="*", type=Path, default=sorted(EXAMPLES.glob("*.py")))
    scripts = parser.parse_args().scripts
    columns = "script", "plain: allocated", "whole: training", "seconds", "stages", "ended"
    print(table_head(columns, "lrrrll"))
    kept = [_row(script) for script in scripts]  # all of them, also after one that fails
    sys.exit(not all(kept))


def _row(script: Path) -> bool:
    try:
        started = time.monotonic()
        whole = dry_run(script, memory=1 << 38, steps=None, batches=3, seconds=120.0, stdout_to_stderr=True)
        seconds = time.monotonic() - started
        plain = dry_run(script, memory=1 << 38, steps=max(STEPS, whole.steps), stdout_to_stderr=True)
    except MemfitError as error:
        print(f"| {script.name} | not run: {error} |", flush=True)
        return False
    training = _training(whole)
    names = ", ".join(f"{use.stage} {use.times}" for use in whole.stages) or "training only"
    sizes = f"{plain.peak_allocated:,}", f"{training:,}"
    print(table_line((script.name, *sizes, f"{seconds:.0f}", names, whole.end.reason)), flush=True)
    return training == plain.peak_allocated and whole.end.reason == "end" and seconds <= LIMIT


def _training(whole: DryRun) -> int:
    """Return the bytes that training allocates at most; of a script that only trains, the run's."""
    uses = (use.allocated for use in whole.stages if use.stage is Stage.TRAINING)
    return next(uses, whole.peak_allocated)


if __name__ == "__main__":
    main()
