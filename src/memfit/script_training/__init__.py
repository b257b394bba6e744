"""Train an unmodified script under a plan: ``memfit train``.

carried_out    what of a plan needs no change in the script's loop, and what does
plan_outcome   says what becomes of the plan, and ends a script that would train without it
process        the script's process: it applies the plan, watches the run, and runs the script
"""
