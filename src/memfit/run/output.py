"""The script's standard output and standard error."""

import sys


def flush_output() -> None:
    """Write what Python has buffered."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or without a reader: Python itself exits silently then
