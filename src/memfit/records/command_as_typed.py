"""A job in place of a script: ``memfit plan job.py:make_job`` runs the module that trains the job."""

from collections.abc import Sequence

JOB_LOOP = "memfit.train.job_loop"
"""Trains the ``memfit.Job`` of a function; its name stands before ``job.py:make_job`` in the command."""


def command_as_typed(command: Sequence[str]) -> tuple[str, ...]:
    """Return a script and its arguments as the user typed them.

    >>> command_as_typed(("memfit.train.job_loop", "job.py:make_job", "--batch-size", "4"))
    ('job.py:make_job', '--batch-size', '4')
    """
    return tuple(command[1:] if is_job_command(command) else command)


def is_job_command(command: Sequence[str]) -> bool:
    """Return whether a command runs a function that makes a ``memfit.Job``."""
    return command[:1] == (JOB_LOOP,)
