"""Python and memfit in new processes; ``warm_process`` runs memfit in forks, which takes less time."""

import os
import socket
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


def variables_of_ranks(ranks):
    """Return the environment of each rank of a job, as torchrun makes it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def start_ranks(ranks, command, cwd, timeout=240, **environment):
    """Run Python as the ranks of a job, as torchrun does; return the code, output and errors of each."""
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=cwd,
            env=os.environ | variables | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for variables in variables_of_ranks(ranks)
    ]
    try:
        return [(each.returncode, *texts) for each in started if (texts := each.communicate(timeout=timeout))]
    finally:
        for each in started:
            each.kill()
