"""The functions behind ``import memfit`` and the command line. Read this first: it is the whole pipeline.

script ── run.parent ──> trace file ── trace.trace_file ──> Trace ─┬─ analysis.summary ────────────> summarize
   dry_run: on the ghost                    no torch from here on  ├─ analysis.explanation ────────> explain
   record: on this machine's GPU                                   ├─ analysis.run_difference ─────> diff
   advice: once more per change                                    ├─ analysis.allocator_comparison > replay
                                                                   └─ packing.run_packing ─────────> pack
"""

from memfit.api.batch_size import max_batch as max_batch
from memfit.api.checking import check as check
from memfit.api.comparison import compare as compare
from memfit.api.ghost_runs import FinishedRun as FinishedRun
from memfit.api.ghost_runs import run_on_ghost as run_on_ghost
from memfit.api.gpus import gpus_for as gpus_for
from memfit.api.packings import pack as pack
from memfit.api.packings import pack_table as pack_table
from memfit.api.planning import auto_checkpoint as auto_checkpoint
from memfit.api.planning import plan as plan
from memfit.api.ranks_together import run_beside_ranks as run_beside_ranks
from memfit.api.runs import dry_run as dry_run
from memfit.api.runs import estimate as estimate
from memfit.api.runs import record as record
from memfit.api.runs import run_on_card as run_on_card
from memfit.api.traces import allocation_table as allocation_table
from memfit.api.traces import chrome_trace as chrome_trace
from memfit.api.traces import diff as diff
from memfit.api.traces import explain as explain
from memfit.api.traces import html_report as html_report
from memfit.api.traces import read as read
from memfit.api.traces import replay as replay
from memfit.api.traces import summarize as summarize
from memfit.api.traces import write_html as write_html
from memfit.api.verifying import verify as verify
from memfit.atomic_files import write_bytes as write_bytes
from memfit.card.context_measurement import keep_context as keep_context
from memfit.card.context_measurement import measure_context as measure_context
from memfit.ghost.doctor import diagnose as diagnose
from memfit.packing.csv_table import packed_table as packed_table
from memfit.patching.patch_list import replaced_names as replaced_names
from memfit.trace.snapshot import write_snapshot as write_snapshot
