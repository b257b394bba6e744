"""The ranks of the job that the script starts itself.

It does so by ``mp.spawn``, ``mp.Process``, a fork or another command. A process is a rank when it joins a
process group of as many ranks as the job has, however it was started. One that joins none, such as the worker
of a data loader, is no rank.

    joins as              the process then
    the rank to run       waits until the others have joined, and goes on without them
    another rank          ends with exit code 0, as if it had trained
    another rank, in the  waits for the processes that it has started
    script's own process

These processes see each other in the run's folder: a file ``<pid>.rank`` that holds the rank of each that has
joined, ``claimed`` with the process that runs, and ``traced`` once its trace is written.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

from memfit.run.descendant_processes import descendants_of_process
from memfit.run.job_rank import Rank

_INTERVAL = 0.05
_PATIENCE = 60.0
"""Seconds that the rank to run waits for the others: a script may have started fewer."""


class StartedRanks:
    """The processes of a run that have joined its process group."""

    def __init__(self, folder: Path, nproc: int) -> None:
        self._folder = folder
        self._nproc = nproc

    def join(self, rank: int) -> None:
        """Record that this process has joined."""
        beside = self._folder / f"{os.getpid()}.joins"
        beside.write_text(f"{rank}")
        beside.replace(beside.with_suffix(".rank"))

    def joined(self) -> list[int]:
        """Return the rank of each process that has joined."""
        return sorted(int(path.read_text()) for path in self._folder.glob("*.rank"))

    def claim(self) -> bool:
        """Choose this process as the one that runs; return whether it is the first."""
        own = self._folder / f"{os.getpid()}.claim"
        own.write_text(f"{os.getpid()}")
        try:
            (self._folder / "claimed").hardlink_to(own)  # appears with its content
        except FileExistsError:
            return False
        return True

    def is_elsewhere(self) -> bool:
        """Return whether another process than this one runs as the rank."""
        return self._claimant() not in (None, os.getpid())

    def note_trace(self) -> None:
        """Record that the rank's trace has been written."""
        (self._folder / "traced").touch()

    def traced(self) -> bool:
        """Return whether the rank's trace has been written."""
        return (self._folder / "traced").exists()

    def note_gpu_use(self) -> None:
        """Record that the script's own process uses a GPU."""
        (self._folder / "used").touch()

    def script_used_gpu(self) -> bool:
        """Return whether the script's own process has used a GPU."""
        return (self._folder / "used").exists()

    def wait_for_others(self) -> None:
        """Wait until as many processes have joined as this machine has ranks."""
        _wait(lambda: len(self.joined()) >= self._nproc, _PATIENCE)

    def wait_for_rank(self) -> None:
        """Wait until the rank to run has ended; at once if this process has started none."""
        _wait(lambda: self.is_elsewhere() or not any(descendants_of_process(os.getpid())), _PATIENCE)
        _wait(lambda: self.traced() or not self._runs(), None)

    def why_none_ran(self, rank: Rank) -> str:
        """Return why ``rank`` wrote no trace; empty if no process has joined."""
        joined = self.joined()
        if rank.rank in joined:
            return f"The process that the script started as {rank} ended before it returned a result."
        if joined:
            ranks = ", ".join(map(str, sorted(set(joined))))
            return (
                f"No process of the script joined its process group as {rank}; they joined as {ranks}. "
                "Choose one of these with --rank, or have the script start the ranks of another machine."
            )
        return ""

    def _claimant(self) -> int | None:
        try:
            return int((self._folder / "claimed").read_text())
        except FileNotFoundError:
            return None

    def _runs(self) -> bool:
        """Return whether the process that runs as the rank has not ended."""
        claimant = self._claimant()
        return claimant is not None and claimant in descendants_of_process(os.getpid())


def _wait(condition: Callable[[], bool], seconds: float | None) -> None:
    until = None if seconds is None else time.monotonic() + seconds
    while not condition() and (until is None or time.monotonic() < until):
        time.sleep(_INTERVAL)
