"""Press Ctrl-C at random moments of memfit's commands, and find what is left of them.

Each command starts in a process group and a folder of its own. At a random moment of its run, SIGINT goes
to the whole group, as from a terminal. The command must then end within a second with exit code 130 and
without a traceback; a second after the signal, neither a process nor a file of it may be left.

Moments before memfit's first line and after its last are drawn again: what Python does then is not memfit's.
Moments in which the script imports torch, and torch imports NumPy, are drawn again, too: torch drops the
interrupt, NumPy refuses to be imported once more, and the script fails with a traceback of its own.
"""

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import memfit
from memfit.termination_signals import INTERRUPTED
from support.new_processes import start_memfit

LIMIT = 1.0  # seconds from Ctrl-C until everything should have gone; reported, but no fault on a busy machine
_PATIENCE = 60.0  # seconds from Ctrl-C until what has not gone counts as left
SCRIPT = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
while True:
    optimizer.zero_grad()
    model(torch.randn(32, 64, device="cuda")).square().mean().backward()
    optimizer.step()
"""
COMMANDS = {
    "dry-run": ("dry-run", "-o", "out.memfit", "--html", "out.html", "train.py"),
    "dry-run --advise": ("dry-run", "--advise", "-o", "out.memfit", "train.py"),
    "explain": ("explain", "--html", "out.html", "--csv", "out.csv", "run.memfit"),
    "pack": ("pack", "--csv", "out.csv", "run.memfit"),
    "replay": ("replay", "--memory", "24GiB", "--json", "out.json", "run.memfit"),
}
_ENDING = 0.2
"""Seconds that Python takes to end after memfit's last line on a busy machine: a command that then exits
with 0 had ended."""
_NUMPY_AGAIN = "ImportError: cannot load module more than once per process"
"""NumPy's message (numpy/tests/test_reloading.py)."""
_MARK = "MEMFIT_INTERRUPTED_BY"
"""An environment variable of each command, which all its descendants inherit."""
_HARMLESS = {"work", "tmp"} | {
    f"work/{name}" for name in ("train.py", "run.memfit", "out.memfit", "out.html", "out.csv", "out.json")
}
"""Inputs, and outputs, which may have been written before Ctrl-C: as a whole, or not at all."""


@dataclass(frozen=True, slots=True)
class Interruption:
    """What was seen of one command after Ctrl-C."""

    command: str
    moment: float
    """Seconds from the command's start to Ctrl-C."""
    seconds: float
    """From Ctrl-C to the end of the command and of what it started."""
    faults: tuple[str, ...]
    """The rules that it broke, apart from the time."""

    @property
    def slow(self) -> bool:
        """Whether it took more than ``LIMIT`` seconds."""
        return self.seconds > LIMIT


def span(name: str, inputs: Path) -> float:
    """Return the seconds of a command's uninterrupted run.

    Raises:
        RuntimeError: if the command fails: an interruption of it would show little.
    """
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        process = _start(name, inputs, Path(folder))
        _, error = process.communicate()
        if process.returncode:
            raise RuntimeError(f"memfit {' '.join(COMMANDS[name])} exits with {process.returncode}: {error}")
        return time.monotonic() - started


def interrupt(name: str, moment: float, inputs: Path) -> Interruption | None:
    """Start a command, press Ctrl-C after ``moment`` seconds; None if it had not begun or had ended."""
    with tempfile.TemporaryDirectory() as folder:
        process = _start(name, inputs, Path(folder))
        started = time.monotonic()
        try:
            process.communicate(timeout=max(0.0, moment - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            pass
        else:
            return None
        pressed = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        try:
            _, error = process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Interruption(name, moment, _PATIENCE, ("did not end",))
        seconds = time.monotonic() - pressed
        was_ending = process.returncode == 0 and seconds < _ENDING
        if was_ending or _hit_python(process.returncode, error) or _NUMPY_AGAIN in error:
            return None
        while _left(Path(folder)) and time.monotonic() - pressed < _PATIENCE:
            time.sleep(0.02)
            seconds = time.monotonic() - pressed
        faults = (*_faults(process.returncode, error), *_left(Path(folder)))
        return Interruption(name, moment, seconds, faults)


def _faults(code: int, error: str) -> Iterator[str]:
    if code != INTERRUPTED:
        yield f"exit code {code}"
    if "Traceback" in error or "Exception ignored" in error:
        yield "traceback: " + error.strip()


def _left(folder: Path) -> list[str]:
    """Return the processes and the files that a command has left."""
    files = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return [
        *(f"left process {process}" for process in _processes(str(folder))),
        *(f"left {file}" for file in files if file not in _HARMLESS),
    ]


def _start(name: str, inputs: Path, folder: Path) -> subprocess.Popen[str]:
    work, temporary = folder / "work", folder / "tmp"
    work.mkdir()
    temporary.mkdir()
    for path in inputs.iterdir():
        (work / path.name).write_bytes(path.read_bytes())
    return start_memfit(*COMMANDS[name], cwd=work, **{"TMPDIR": str(temporary), _MARK: str(folder)})


def _hit_python(code: int, error: str) -> bool:
    """Return whether Ctrl-C came before Python ran memfit's first line: what Python does then is its own."""
    own = f"{Path(memfit.__file__).parent}{os.sep}"
    return own not in error and (code == -signal.SIGINT or "Traceback" in error)


def _processes(mark: str) -> Iterator[str]:
    """Yield the names of the processes that a command left."""
    entry = f"{_MARK}={mark}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if entry in (process / "environ").read_bytes().split(b"\0"):
                yield f"{(process / 'comm').read_text().strip()} {process.name}"
        except OSError:  # it has just ended, or is someone else's
            continue


def interruptions(
    spans: Mapping[str, float], moments: int, seed: int, inputs: Path
) -> Iterator[Interruption]:
    """Interrupt the commands in turn at random moments of their runs.

    Args:
        spans: for each command, from how many seconds after its start on it may have ended.
        moments: how many times to press Ctrl-C.
        seed: of the random moments.
        inputs: a folder with ``train.py`` and ``run.memfit``.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret depends on it
    for number in range(moments):
        name = list(spans)[number % len(spans)]
        while (found := interrupt(name, chance.uniform(0, spans[name]), inputs)) is None:
            continue
        yield found
