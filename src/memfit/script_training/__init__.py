"""Train an unmodified script under a plan: ``memfit train``.

``training_process`` is the script's process: it applies the plan, says what becomes of it, watches the run,
and runs the script.
"""
