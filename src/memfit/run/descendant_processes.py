"""The processes that a process started, and those that they started in turn.

A process that detaches itself, such as a daemon, has no parent among them; it still has the environment
variables that it inherited.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def kill_descendants(ancestor: int) -> None:
    """Kill what a process started, and what that started in turn; the process itself lives on.

    A process whose parent has ended, such as a daemon's, no longer counts.
    """
    while found := list(descendants_of_process(ancestor)):
        for process in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)


def descendants_of_process(ancestor: int) -> Iterator[int]:
    """Yield the descendants of a process that are not zombies."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # The command's name, in parentheses, may contain spaces and parentheses itself.
            state, parent, *_ = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children.setdefault(int(parent), []).append(int(folder.name))
        if state in "ZX":
            zombies.add(int(folder.name))
    to_visit = [ancestor]
    while to_visit:
        found = children.get(to_visit.pop(), [])
        to_visit += found
        yield from (process for process in found if process not in zombies)


def processes_with_environment(text: str) -> Iterator[int]:
    """Yield the user's processes that started with environment variables in which a text occurs."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.fsencode(text) in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:  # it has just ended, or is another user's
            continue
