"""What commands run in place of a script: names of library models, and functions that make a job.

A module of memfit's trains it; its name stands before the target in the command.
"""

from collections.abc import Sequence

LIBRARY_MODELS = "memfit.estimating.library_model"
"""Trains ``torchvision:resnet50`` and its like."""
JOBS = "memfit.train.job_loop"
"""Trains the ``memfit.Job`` of ``job.py:make_job``."""


def typed(command: Sequence[str]) -> tuple[str, ...]:
    """Return a script and its arguments as the user typed them.

    >>> typed(("memfit.train.job_loop", "job.py:make_job", "--batch-size", "4"))
    ('job.py:make_job', '--batch-size', '4')
    """
    return tuple(command[1:] if is_job(command) or command[:1] == (LIBRARY_MODELS,) else command)


def is_job(command: Sequence[str]) -> bool:
    """Return whether a command runs a function that makes a ``memfit.Job``."""
    return command[:1] == (JOBS,)
