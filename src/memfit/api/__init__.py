"""The functions behind ``import memfit`` and the command line. Read this first: it is the whole pipeline.

script ── run.parent ──> trace file ── trace.trace_file ──> Trace ─┬─ analysis.summary ────────────> summarize
   dry_run: on the ghost                    no torch from here on  ├─ analysis.explanation ────────> explain
   record: on this machine's GPU                                   ├─ analysis.breakdown ──────────> diff
   advice: once more per change                                    ├─ analysis.allocator_comparison > replay
                                                                   └─ packing.run_packing ─────────> pack
"""
