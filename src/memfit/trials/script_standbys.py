"""Further runs of a script, forked from the process of an earlier run, which stands by.

memfit's side (``run/standby_fork.py`` is the script's): the standby of one run, and which runs can go on
from it without starting the script again.
"""

import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Lock
from typing import Self

import msgspec

from memfit.records import Change
from memfit.run.child_start import (
    ChildSettings,
    GhostSettings,
    ScriptSubprocess,
    StartScript,
    start_script,
    write_child_settings_file,
)
from memfit.run.descendant_processes import kill_descendants
from memfit.run.options import RunOptions
from memfit.run.standby_fork import MOST_BYTES, StandbyMessage
from memfit.trials.runs_side_by_side import count_scripts_that_fit_in_memory

_GONE = -signal.SIGKILL
"""The exit code of runs whose standby has gone."""
_PATIENCE = 10.0
"""Seconds that a fork may take beyond twice the whole run: one that waits for what it lacks never ends."""
_INTERVAL = 0.1  # seconds between two looks at whether a run has ended
_ANSWER = 1.0
"""Seconds for what the script has said of its standby: it has had its whole run for that."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """A run of a script, as far as its beginning may depend on it."""

    command: tuple[str, ...]
    """The script's ``sys.argv``, without what ``change`` adds to it."""
    options: RunOptions
    ghost: GhostSettings
    change: Change

    def can_become(self, other: "ScriptRun") -> bool:
        """Return whether another run would have begun as this one has, and can go on from there."""
        return (
            self.command == other.command
            and _without_the_rest(self.options) == _without_the_rest(other.options)
            and self._shown() == other._shown()
            and self.ghost.device.total.bytes <= other.ghost.device.total.bytes
            and self.options.finish_late <= other.options.finish_late
            and self._can_change_to(other.change)
        )

    def _can_change_to(self, other: Change) -> bool:
        """Return whether what another change adds can be added when the script begins to train."""
        same = replace(other, operations=self.change.operations) == self.change
        added = replace(self.change, plan=other.plan, optimizer=other.optimizer)
        can_be_added = (
            not self.change.strategies
            and other.is_late
            and replace(added, operations=other.operations) == other
        )
        return (same or can_be_added) and other.operations <= self.change.operations

    def _shown(self) -> int:
        """Return the bytes of memory that the script sees."""
        shown = self.ghost.shown_memory
        return self.ghost.device.total.bytes if shown is None else shown


def _without_the_rest(options: RunOptions) -> RunOptions:
    """Return the options that what a script does until it trains depends on."""
    return replace(
        options,
        memory=None,
        unlimited=False,
        finish_late=False,
        preload=None,
        objects="",
        stdout_to_stderr=False,
    )


class Standby:
    """The standby of a script's whole run, from which further runs are forked.

    When it is closed, or memfit ends, the standby ends with all that it has started. Threads may fork runs
    side by side.
    """

    def __init__(self, run: ScriptRun) -> None:
        self.run = run
        self.users = 1
        """Runs that go on: the whole run, then its forks."""
        self.has_ended = False
        """Whether the whole run has."""
        self._channel: socket.socket | None = None
        self._process = 0
        self._started = 0.0
        self._seconds = 0.0
        """Duration of the whole run."""
        self._ended: dict[int, int] = {}
        """Exit codes of runs, by their process."""
        self._listening = Lock()
        self.declined = ""
        """Why the script's process could not be forked."""

    def start(self, command: tuple[str, ...], settings: ChildSettings) -> ScriptSubprocess:
        """Start the whole run, which leaves a standby."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started = time.monotonic()
        with theirs:
            return start_script(command, msgspec.structs.replace(settings, standby=theirs.fileno()))

    @property
    def is_ready(self) -> bool:
        """Whether the whole run has ended, and has left a standby."""
        if self.has_ended and self._channel is not None and not self._process:
            self._seconds = time.monotonic() - self._started
            message = self._receive(_ANSWER)
            while (later := self._receive(0.0)).standby:
                message = later
            self.declined, self._process = message.declined, message.standby
            if not self._process:
                self.close()
        return bool(self._process)

    def fork(self, _command: tuple[str, ...], settings: ChildSettings) -> ScriptSubprocess:
        """Start another run of the same command, forked from the standby."""
        if self._channel is None:
            raise AssertionError  # is_ready
        with self._listening:
            with suppress(OSError):  # it has gone: the run ends at once
                self._channel.send(os.fsencode(write_child_settings_file(settings)))
            while (message := self._receive()).ended is not None and message.run:
                self._ended[message.run] = message.ended
        deadline = time.monotonic() + 2 * self._seconds + _PATIENCE
        return ForkedScript(message.run, self._exit_code, deadline)

    def _exit_code(self, process: int, seconds: float) -> int | None:
        """Return the exit code of a run; None if it has not ended in time."""
        with self._listening:
            while process not in self._ended:
                message = self._receive(seconds)
                if message.ended is None:
                    return None
                self._ended[message.run or process] = message.ended
            return self._ended[process]

    def _receive(self, seconds: float | None = None) -> StandbyMessage:
        """Return the next message: empty if none comes in time, an end of no run if the standby has gone."""
        if self._channel is None or not select.select([self._channel], [], [], seconds)[0]:
            return StandbyMessage()
        try:
            text = self._channel.recv(MOST_BYTES)
        except ConnectionResetError:
            text = b""
        return msgspec.json.decode(text, type=StandbyMessage) if text else StandbyMessage(ended=_GONE)

    def close(self) -> None:
        """End the standby, with all that it has started."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process:
            kill_descendants(self._process)
            with suppress(ProcessLookupError):
                os.kill(self._process, signal.SIGKILL)
            self._process = 0


class ForkedScript:
    """A run forked from a standby.

    Args:
        process: of the run; 0 if it did not start.
        exit_code: returns that of a process; None if it does not end within the seconds given.
        deadline: the time (``time.monotonic()``) after which it is killed.
    """

    def __init__(self, process: int, exit_code: Callable[[int, float], int | None], deadline: float) -> None:
        self.pid = process
        self.returncode: int | None = None if process else _GONE
        self._exit_code = exit_code
        self._deadline = deadline

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        if self.returncode is None:
            self.returncode = self._exit_code(self.pid, 0.0)
        if self.returncode is None and time.monotonic() > self._deadline:
            kill_descendants(self.pid)
            self.kill()
        return self.returncode

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""
        while self.returncode is None:
            self.returncode = self._exit_code(self.pid, _INTERVAL)
        return self.returncode

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


_MOST = 4
"""Standbys at most: each is a process with what the script holds in memory when it begins to train."""
_SPARE = 3
"""Runs that must fit into memory for another standby: itself, and two side by side."""


class ScriptStandbys:
    """The standbys that whole runs of a script leave, for runs that begin alike. Use it as a context manager.

    Threads may make runs side by side.
    """

    def __init__(self) -> None:
        self._kept: list[Standby] = []
        """Those that were used last come last."""
        self._lock = Lock()

    def declined(self, run: ScriptRun) -> str:
        """Return why a run that this one could have gone on from left no standby; empty if there is none."""
        return next((kept.declined for kept in self._all_for(run)), "")

    @contextmanager
    def whole(self, run: ScriptRun) -> Iterator[StartScript]:
        """Yield what starts a run of the whole script; it leaves a standby unless another run like it did."""
        with self._lock:
            kept = self._add(run)
        if kept is None:
            yield start_script
            return
        try:
            yield kept.start
        finally:
            kept.has_ended = True
            self._release(kept)

    @contextmanager
    def fork(self, run: ScriptRun) -> Iterator[StartScript | None]:
        """Yield what starts a run from a standby; None if there is none for it."""
        with self._lock:
            kept = next((each for each in self._all_for(run) if each.is_ready), None)
            if kept is not None:
                kept.users += 1
                self._kept.remove(kept)
                self._kept.append(kept)
        if kept is None:
            yield None
            return
        try:
            yield kept.fork
        finally:
            self._release(kept)

    def _all_for(self, run: ScriptRun) -> list[Standby]:
        """Return the standbys from which a run can go on; some may not be ready, or were declined."""
        return [kept for kept in self._kept if kept.run.can_become(run)]

    def _add(self, run: ScriptRun) -> Standby | None:
        """Add the standby of a run that is to begin; return None if it is to leave none."""
        if run.options.real_ranks or self._all_for(run):  # ranks must fork at the same moment
            return None
        if self._kept and count_scripts_that_fit_in_memory() < _SPARE:
            return None
        unused = [kept for kept in self._kept if kept.users == 0]
        if len(self._kept) >= _MOST:
            if not unused:
                return None
            unused[0].close()
            self._kept.remove(unused[0])
        new = Standby(run)
        self._kept.append(new)
        return new

    def _release(self, kept: Standby) -> None:
        with self._lock:
            kept.users -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for kept in self._kept:
            kept.close()
