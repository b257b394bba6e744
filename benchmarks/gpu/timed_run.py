"""Run a training script unchanged, and read from its output when each step ended."""

import os
import re
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import memfit

_LOSS = re.compile(r"(?<![\w_])loss'?:?\s*'?(\d[-+.\de]*|nan|inf)")
_FOLDER = re.compile(r"(?<=\s)/(?:[^/\s]+/)+")
_PEAK = re.compile(r"peak (allocated|reserved) ([\d,]+) B")


@dataclass(frozen=True)
class TimedRun:
    """What a script printed, and when."""

    code: int | None
    """Exit code; None if it took too long and was stopped."""
    seconds: float
    """Of the whole process."""
    losses: tuple[str, ...]
    """As printed, a step each."""
    steps: tuple[float, ...]
    """Seconds between the line of a step and the next."""
    peaks: dict[str, int]
    """By "allocated" and "reserved": the most bytes, as the script prints them at its end."""
    said: tuple[str, ...]
    """memfit's own lines, without the folders of files."""
    error: str
    """The last line of standard error."""

    def median(self, warm_up: int) -> float | None:
        """Return the median of the seconds of a step; None without steps.

        Args:
            warm_up: how many steps at the beginning do not count.
        """
        counted = self.steps[max(warm_up - 1, 0) :]  # the first difference is the second step's
        return statistics.median(counted) if counted else None


def timed_run(command: Sequence[str], folder: Path, seconds: float) -> TimedRun:
    """Run a script that prints a line with its loss after each step.

    Args:
        command: the process.
        folder: its working folder.
        seconds: its time limit.
    """
    source = str(Path(memfit.__file__).parents[1])  # where memfit is not installed
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), source)))
    lines: list[tuple[float, str]] = []
    begun = time.perf_counter()
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            errors="replace",
            cwd=folder,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path},
            start_new_session=True,
        ) as process,
    ):
        output = process.stdout or ()
        reader = threading.Thread(
            target=lambda: lines.extend((time.perf_counter(), line) for line in output), daemon=True
        )
        reader.start()
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        reader.join()
        took = time.perf_counter() - begun
        errors.seek(0)
        said = errors.read().splitlines()
    return _read(code, took, lines, said)


def _read(
    code: int | None, seconds: float, lines: Sequence[tuple[float, str]], said: Sequence[str]
) -> TimedRun:
    steps = [(at, found[1]) for at, line in lines if (found := _LOSS.search(line))]
    return TimedRun(
        code,
        seconds,
        losses=tuple(loss for _, loss in steps),
        steps=tuple(after - before for (before, _), (after, _) in pairwise(steps)),
        peaks={kind: int(size.replace(",", "")) for _, line in lines for kind, size in _PEAK.findall(line)},
        said=tuple(_FOLDER.sub("", line.strip()) for line in said if line.strip().startswith("memfit:")),
        error=said[-1].strip() if said else "",
    )
