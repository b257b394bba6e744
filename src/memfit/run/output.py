"""The script's standard output and standard error."""

import os
import sys


def silence() -> None:
    """Hide what this process prints, and give it no input."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def flush_output() -> None:
    """Write what Python has buffered."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or without a reader: Python itself exits silently then
