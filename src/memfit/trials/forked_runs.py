"""Further runs of a script, forked from the script's own process (``standby.py``): memfit's side."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock

import msgspec

from memfit.run.child_settings import ChildSettings
from memfit.run.process_tree import kill_descendants
from memfit.run.standby import MOST_BYTES, StandbyMessage
from memfit.run.start_script import RunningScript, settings_file, start_script

_GONE = -signal.SIGKILL
"""The exit code of runs whose standby has gone."""
_PATIENCE = 10.0
"""Seconds that a fork may take beyond twice the whole run: one that waits for what it lacks never ends."""
_INTERVAL = 0.1  # seconds between two looks at whether a run has ended
_ANSWER = 1.0
"""Seconds for what the script has said of its standby: it has had its whole run for that."""


class Standby:
    """The standby of a script's whole run, from which further runs are forked.

    When it is closed, or memfit ends, the standby ends with all that it has started. Threads may fork runs
    side by side.
    """

    def __init__(self) -> None:
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

    def start(self, command: tuple[str, ...], settings: ChildSettings) -> RunningScript:
        """Start the whole run, which leaves a standby."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._started = time.monotonic()
        with theirs:
            return start_script(command, msgspec.structs.replace(settings, standby=theirs.fileno()))

    def is_ready(self) -> bool:
        """Return whether the whole run has left a standby; call this once that run has ended."""
        if self._channel is not None and not self._process:
            self._seconds = time.monotonic() - self._started
            message = self._receive(_ANSWER)
            while (later := self._receive(0.0)).standby:
                message = later
            self.declined, self._process = message.declined, message.standby
            if not self._process:
                self.close()
        return bool(self._process)

    def fork(self, _command: tuple[str, ...], settings: ChildSettings) -> RunningScript:
        """Start another run of the same command, forked from the standby."""
        if self._channel is None:
            raise AssertionError  # is_ready()
        with self._listening:
            with suppress(OSError):  # it has gone: the run ends at once
                self._channel.send(os.fsencode(settings_file(settings)))
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
