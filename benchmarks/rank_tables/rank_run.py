"""Dry runs of ranks, measured from outside: what memfit answers, how long it takes, and its host memory."""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GIB = 1 << 30
PAGE = os.sysconf("SC_PAGE_SIZE")
RSS_FIELD = 23
"""Index of the resident pages in /proc/PID/stat; that of the parent's process id is 3 (proc(5))."""


@dataclass(frozen=True, slots=True)
class RankRun:
    """What one command of memfit gave."""

    answer: dict[str, Any]
    """The public JSON."""
    printed: str
    """The script's output and memfit's summary."""
    seconds: float
    """Wall time of the whole command."""
    processor_seconds: float
    """Processor time of memfit and the processes that it started and waited for."""
    host_bytes: int
    """The largest sum of the resident memory of memfit and its descendants, looked up every 0.1 s."""


def dry_run(script: Path, arguments: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> RankRun:
    """Dry-run a script to its end.

    Args:
        script: a path below the repository's root.
        arguments: of the script.
        options: of memfit, such as ``--nproc 8``.

    Raises:
        SystemExit: memfit gave no answer, or the script failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report.json"), Path(folder, "output")
        command = [sys.executable, "-m", "memfit", "dry-run", "--to-end", "--json", str(report), *options]
        begun, busy, most = time.perf_counter(), _processor_seconds(), 0
        with output.open("w") as printed:
            process = subprocess.Popen(
                [*command, "--", str(script), *arguments], stdout=printed, stderr=printed, cwd=folder
            )
            while process.poll() is None:
                most = max(most, _resident(process.pid))
                time.sleep(0.1)
        seconds, text = time.perf_counter() - begun, output.read_text()
        if process.returncode or not report.exists():
            raise SystemExit(f"{' '.join(command)} {script} ended with {process.returncode}:\n{text[-2000:]}")
        busy = _processor_seconds() - busy
        return RankRun(json.loads(report.read_text()), text, seconds, busy, most)


def _processor_seconds() -> float:
    """Return the processor time of all processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _resident(root: int) -> int:
    """Return the resident bytes of a process and its descendants."""
    parents, resident = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # a name may contain spaces
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        process = int(stat.parent.name)
        parents[process], resident[process] = int(fields[3 - 2]), int(fields[RSS_FIELD - 2]) * PAGE
    family = {root}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    return sum(resident.get(process, 0) for process in family)
