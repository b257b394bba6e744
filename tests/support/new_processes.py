"""Python and memfit in new processes; ``warm_process`` runs memfit in forks, which takes less time."""

import os
import subprocess
import sys
from pathlib import Path


def run_python(
    *command: object, cwd: Path | None = None, timeout: int = 240, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, with these variables in addition; the result has what it printed."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        timeout=timeout,
        env=os.environ | environment,
    )


def start_memfit(
    *arguments: object, cwd: Path, before: tuple[str, ...] = (), **environment: str
) -> subprocess.Popen[str]:
    """Start memfit in a process group of its own, for Ctrl-C; ``before`` is a command that starts it."""
    return subprocess.Popen(
        [*before, sys.executable, "-m", "memfit", *map(str, arguments)],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
