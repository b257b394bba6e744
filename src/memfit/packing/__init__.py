"""Assign buffers with lifetimes and sizes to offsets in one block of memory.

Trace ──── lifetimes ──┐                       ┌─ greedy ────────────┐
Dataflow ─ alias sets ─┼─> Buffers ── parts ───┤                     ├──> Packing ── validator, CSV, report
CSV ───────────────────┘                       └─ exhaustive search ─┘
"""
