"""Train an unmodified script under a plan: ``memfit train``.

plan_outcome   what of a plan needs no change in the script's loop; says what becomes of it, and ends a script that
               would train without it
process        the script's process: it applies the plan, watches the run, and runs the script
"""
