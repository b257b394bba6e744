"""The other ranks of the script's job that memfit runs beside the script, on this machine.

The script waits for what only they have: objects, small tensors (``ghost/ranks/object_exchange_files.py``)
and files (``ghost/ranks/files_of_other_ranks.py``). Their output is hidden, and they end with the script at
the latest.
"""

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from memfit.run.child_start import ChildSettings, kill_script, start_script

_MOST = 16
"""Ranks that may run beside the script: each takes about 0.7 GiB of host memory."""
_STILL = 5.0
"""Seconds after which ranks that all wait are taken to wait for each other."""


class OtherRanks:
    """The ranks that the script has asked for."""

    def __init__(self, command: tuple[str, ...], settings: ChildSettings) -> None:
        self._command = command
        self._settings = settings
        self._asks = Path(settings.asks)
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._readers: list[int] = []  # of the ranks' progress, which is not shown
        self._all_wait_since: float | None = None

    def look(self) -> tuple[int, ...]:
        """Start the ranks that are asked for, and tell those that wait if there is nothing to wait for.

        Returns:
            The ranks that run beside the script now.
        """
        if not self._settings.asks:
            return ()
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
        return tuple(rank for rank, process in self._running.items() if process.returncode is None)

    def close(self) -> None:
        """End them."""
        for process in self._running.values():
            kill_script(process)
        for reader in self._readers:
            os.close(reader)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        folder = self._asks / f"rank-{rank}"
        folder.mkdir()
        (self._asks / f"wanted-{self._settings.options.rank.rank}").touch()  # they wait for it, too
        pipe, trace = folder / "progress", str(folder / "run.memfit")
        os.mkfifo(pipe)
        self._readers.append(os.open(pipe, os.O_RDWR | os.O_NONBLOCK))
        options = self._settings.options
        settings = msgspec.structs.replace(
            self._settings,
            options=replace(options, rank=replace(options.rank, rank=rank), labels=False, steps=None),
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
