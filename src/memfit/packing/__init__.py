"""Buffers with lives and sizes to offsets in one arena.

Trace ──── lifetimes ─┐                  ┌─ greedy ─┐
Dataflow ─ aliases ───┼─> Buffers ───────┤          ├──> Packing ── validator, table, report
CSV ────── table ─────┘     └─ sections, └─ exact ──┘
                               apart
"""
