"""``memfit.arena``: a training step's memory at planned offsets of one arena.

a step, recorded twice ── lives ──> packing ──> Plan ── c/arena.c ──> the same step, placed
                                                  └─ plans (kept in a file)
"""
