"""``memfit.arena``: training steps whose memory is placed at planned offsets of one arena.

a step, recorded twice ── lifetimes ──> packing ──> StepPlan ── c/arena.c ──> the same step, placed
                                                        └─ plan file (for later runs)
"""
