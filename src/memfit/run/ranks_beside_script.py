"""The other ranks of the script's job that run on this machine.

``OtherRanks``: ranks that memfit runs beside the script because it waits for objects that only they have.
They exchange them through files (``ghost/ranks/object_exchange_files.py``). Their output is hidden, and they
end with the script at the latest.

``StartedRanks``: ranks that the script starts itself, by ``mp.spawn``, ``mp.Process``, a fork or another
command. A process is a rank when it joins a process group of as many ranks as the job has, however it was
started. One that joins none, such as the worker of a data loader, is no rank.

    joins as              the process then
    the rank to run       waits until the others have joined, and goes on without them
    another rank          ends with exit code 0, as if it had trained
    another rank, in the  waits for the processes that it has started
    script's own process

These processes see each other in the run's folder: a file ``<pid>.rank`` that holds the rank of each that has
joined, ``claimed`` with the process that runs, and ``traced`` once its trace is written.
"""

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from memfit.run.child_start import ChildSettings, kill_script, start_script
from memfit.run.descendant_processes import descendants_of_process
from memfit.run.job_rank import Rank

_MOST = 16
"""Ranks that may run beside the script: each takes about 0.7 GiB of host memory."""
_STILL = 5.0
"""Seconds after which ranks that all wait are taken to wait for each other."""
_INTERVAL = 0.05
_PATIENCE = 60.0
"""Seconds that the rank to run waits for the others: a script may have started fewer."""


class OtherRanks:
    """The ranks that the script has asked for.

    Args:
        command: the script's ``sys.argv``.
        settings: those of the rank that the run is about.
    """

    def __init__(self, command: tuple[str, ...], settings: ChildSettings) -> None:
        self._command = command
        self._settings = settings
        self._asks = Path(settings.asks)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[int] = []  # of the ranks' progress, which is not shown
        self._all_wait_since: float | None = None

    def look(self) -> None:
        """Start the ranks that are asked for, and tell those that wait if there is nothing to wait for."""
        if not self._settings.asks:
            return
        wanted = {int(path.name.removeprefix("wanted-")) for path in self._asks.glob("wanted-*")}
        for rank in sorted(wanted - self._running.keys()):
            if len(self._running) == _MOST:
                self._fail(f"failed-{rank}", f"memfit runs at most {_MOST} other ranks beside one")
            elif rank != self._settings.options.rank.rank:
                self._running[rank] = self._start(rank)
        for rank, process in self._running.items():
            if process.poll() is not None:
                self._fail(
                    f"failed-{rank}", f"rank {rank}, which memfit ran beside it, ended without sending it"
                )
        self._discard_progress()
        self._look_for_a_circle()

    def close(self) -> None:
        """End them."""
        for process in self._running.values():
            kill_script(process)
        for reader in self._readers:
            os.close(reader)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        folder = self._asks / f"rank-{rank}"
        folder.mkdir()
        pipe, trace = folder / "progress", str(folder / "run.memfit")
        os.mkfifo(pipe)
        self._readers.append(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
        options = self._settings.options
        settings = msgspec.structs.replace(
            self._settings,
            options=replace(options, rank=replace(options.rank, rank=rank), labels=False),
            output=trace,
            fallback=trace,
            folder=str(folder),
            progress=str(pipe),
            standby=None,
        )
        return start_script(self._command, settings, hidden=True)

    def _discard_progress(self) -> None:
        for reader in self._readers:
            with suppress(BlockingIOError):
                os.read(reader, 1 << 16)

    def _look_for_a_circle(self) -> None:
        """Tell the ranks that wait if all of them have waited for a while."""
        alive = {rank for rank, process in self._running.items() if process.poll() is None}
        waiting = {int(path.name.removeprefix("waits-")) for path in self._asks.glob("waits-*")}
        if not alive or not alive | {self._settings.options.rank.rank} <= waiting:
            self._all_wait_since = None
        elif self._all_wait_since is None:
            self._all_wait_since = time.monotonic()
        elif time.monotonic() - self._all_wait_since > _STILL:
            names = ", ".join(map(str, sorted(waiting)))
            self._fail("failed", f"the ranks {names} wait for each other")

    def _fail(self, name: str, why: str) -> None:
        """Say why an object does not come, in one piece."""
        if not (self._asks / name).exists():
            (self._asks / f"{name}.new").write_text(why)
            (self._asks / f"{name}.new").replace(self._asks / name)


class StartedRanks:
    """The processes of a run that have joined its process group.

    Args:
        folder: the run's temporary folder.
        nproc: ranks on this machine.
    """

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
