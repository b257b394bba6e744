"""Train an unmodified script under a plan: ``memfit train``.

plan_outcome   what of a plan needs no change in the script's loop, and what becomes of it
process        the script's process: it applies the plan, watches the run, and runs the script
"""
