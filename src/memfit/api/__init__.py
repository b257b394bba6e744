"""The functions behind ``import memfit`` and the command line. Read this first: it is the whole pipeline.

script ── run.parent ──> trace file ── trace.trace_file ──> Trace ─┬─ analysis.summary ────────────> summarize
   dry_run: on the ghost                    no torch from here on  ├─ analysis.explanation ────────> explain
   record: on this machine's GPU                                   ├─ analysis.run_difference ─────> diff
   advice: once more per change                                    ├─ analysis.allocator_comparison > replay
                                                                   └─ packing.run_packing ─────────> pack
"""

from memfit.api.batch_size import max_batch
from memfit.api.checking import check
from memfit.api.comparison import compare
from memfit.api.ghost_runs import FinishedRun, run_on_ghost
from memfit.api.gpus import gpus_for
from memfit.api.packings import pack, pack_table
from memfit.api.planning import auto_checkpoint, plan
from memfit.api.ranks_together import run_beside_ranks
from memfit.api.runs import dry_run, estimate, record, run_on_card
from memfit.api.traces import (
    chrome_trace,
    diff,
    explain,
    html,
    read,
    replay,
    summarize,
    table,
    write_html,
)
from memfit.api.verifying import verify
from memfit.atomic_files import write_bytes
from memfit.card.context_measurement import keep_context, measure_context
from memfit.ghost.doctor import Check, checks
from memfit.packing.csv_table import packed_table
from memfit.patching.patch_list import replaced_names
from memfit.trace.snapshot import write_snapshot

__all__ = [
    "FinishedRun",
    "auto_checkpoint",
    "check",
    "chrome_trace",
    "compare",
    "diagnose",
    "diff",
    "dry_run",
    "estimate",
    "explain",
    "gpus_for",
    "html",
    "keep_context",
    "max_batch",
    "measure_context",
    "pack",
    "pack_table",
    "packed_table",
    "plan",
    "read",
    "record",
    "replaced_names",
    "replay",
    "run_beside_ranks",
    "run_on_card",
    "run_on_ghost",
    "summarize",
    "table",
    "verify",
    "write_bytes",
    "write_html",
    "write_snapshot",
]


def diagnose() -> tuple[Check, ...]:
    """Check everything memfit needs; each check reports what was found or how to fix it."""
    return checks()
