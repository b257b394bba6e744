"""Buffers with lives and sizes to offsets in one arena.

Trace ── lifetimes ─┐                  ┌─ greedy ─┐
CSV ──── table ─────┴─> Buffers ───────┤          ├──> Packing ── validator, table, report
                          └─ sections, └─ exact ──┘
                             apart
"""
