"""Train an unmodified script under a plan: ``memfit train``.

``training_process`` is the script's process: it applies the plan, watches the run, and runs the script.
``plan_application_watcher`` says what becomes of the plan, and ends a script that would train without it.
"""
