"""Print, for each example, whether forked runs have the traces of whole ones, and their times.

    python benchmarks/forked_runs.py [SCRIPT ...]

Each script runs as written, which leaves a standby; then with GPU work that finishes late, forked and whole.
Traces are equal if their statistics and all events are: action, size, stream, pool, label and owner. Exits
with 1 if a forked run differs from a whole one, unless two whole runs differ as well: autocast releases its
copies in the order of their addresses.
"""

import sys
import time
from pathlib import Path

import numpy as np
from measuring import EXAMPLES, command_line, table_head, table_line

from memfit.analysis.trial_result import TrialResult
from memfit.records import Change, ScriptEnd, Trace
from memfit.run.job_rank import Rank
from memfit.run.options import RunOptions
from memfit.run.parent import ScriptProgress
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.trials.script_standbys import ScriptRun, ScriptStandbys
from memfit.trials.trial_run import run_trial

SCRIPTS = sorted(str(path) for path in EXAMPLES.rglob("*.py"))
SHOWN = 80 << 30
COLUMNS = ("action", "size", "stream", "category", "pool", "tensor")


def difference(one: Trace, other: Trace) -> str:
    """Return in what two traces differ; empty if in nothing that counts."""
    if len(one.events) != len(other.events):
        return f"{len(one.events):,} instead of {len(other.events):,} events"
    pairs = {name: (getattr(one.events, name), getattr(other.events, name)) for name in COLUMNS}
    unlike = [name for name, (this, that) in pairs.items() if not np.array_equal(this, that)]
    unlike += ["label"] * (_labels(one) != _labels(other))
    unlike += ["statistics"] * (one.statistics != other.statistics)
    return ", ".join(unlike)


def _labels(trace: Trace) -> list[tuple[str, str, str]]:
    """Return the phase, module and operation of each event; which thread interned a label first is chance."""
    named = [(label.phase, label.module, label.op) for label in trace.labels]
    return [named[index] if index >= 0 else ("", "", "") for index in trace.events.label]


def run(
    script: str, standbys: ScriptStandbys | None, *, late: bool
) -> tuple[TrialResult, float, ScriptProgress]:
    """Run a script; return the result, its seconds, and its last progress, which says if it was forked.

    Raises:
        SystemExit: the script did not complete.
    """
    ranks = Rank(nproc=2) if Path(script).parent.name == "distributed" else Rank()
    options = RunOptions(memory=SHOWN, unlimited=True, gpu="H100", rank=ranks, finish_late=late)
    shown: list[ScriptProgress] = []
    began = time.monotonic()
    this = ScriptRun((script,), options, resolve_ghost_settings(options), Change())
    result = run_trial(this, shown.append, standbys)
    if isinstance(result, ScriptEnd):
        raise SystemExit(f"{script}: {result}")
    return result, time.monotonic() - began, shown[-1]


def row(script: str) -> tuple[list[str], bool]:
    """Run a script; return the cells of its row, and whether its forked runs are as they should be."""
    with ScriptStandbys() as standbys:
        first, whole_seconds, _ = run(script, standbys, late=False)
        again, seconds, now = run(script, standbys, late=False)
        late, late_seconds, then = run(script, standbys, late=True)
        why = "" if now.forked and then.forked else now.unforked or "no moment to fork at"
    whole_late, _, _ = run(script, None, late=True)
    unlike = difference(late.trace, whole_late.trace), difference(again.trace, first.trace)
    by_itself = difference(run(script, None, late=True)[0].trace, whole_late.trace) if any(unlike) else ""
    cells = [f"{each:.1f} s" for each in (whole_seconds, seconds, late_seconds)]
    cells.append(f"{len(first.trace.events):,}")
    cells += [why or "; ".join(filter(None, unlike)) or "equal", by_itself]
    return cells, not any(unlike) or bool(by_itself)


def main() -> int:
    """Print the table; return 1 if a forked run is not as it should be."""
    parser = command_line(__doc__)
    parser.add_argument("scripts", nargs="*", metavar="SCRIPT", default=SCRIPTS)
    scripts = parser.parse_args().scripts
    columns = ("script", "whole", "forked", "forked, late", "events", "traces", "two whole runs differ in")
    print(table_head(columns, "lrrrrll"), flush=True)
    failed = False
    for script in scripts:
        cells, right = row(script)
        print(table_line((Path(script).name, *cells)), flush=True)
        failed |= not right
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
