"""The pipe through which the script's process reports to memfit's."""

import ctypes
import os
import select
import signal
import time
from collections.abc import Callable

import msgspec

from memfit.errors import TargetError
from memfit.records import ScriptEnd

PROGRESS_INTERVAL = 0.1  # seconds between two lines of progress
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
LAST_WORDS = 5.0
"""Seconds that a script gets to end after the rank that it started. It may wait for ranks that never ran."""


class ChildMessage(msgspec.Struct, frozen=True):
    """One line from the child: its progress, or how the script ended."""

    step: int = 0
    allocated: int = 0
    peak: int = 0
    compiling: bool = False
    end: ScriptEnd | None = None
    traced: bool = False
    interrupted: bool = False
    """Ctrl-C has ended the script; it writes its trace now."""
    unsaved: str = ""
    started: bool = False
    """Whether this is from a rank that the script started, not from the script's own process."""

    @property
    def patience(self) -> float | None:
        """Seconds that the script gets to end once a rank that it started has ended; None until then."""
        if not self.started or self.end is None:
            return None
        return LAST_WORDS if self.end.reason in ("end", "exception", "out of memory") else 0.0


class ParentPipe:
    """Sends lines of JSON to the parent: progress, at most ten times a second, and the end."""

    def __init__(self, descriptor: int | None, *, started: bool = False) -> None:
        """Write to a file descriptor, if there is one.

        Args:
            descriptor: of the pipe.
            started: whether this process is a rank that the script started.
        """
        self._descriptor = descriptor
        self.started = started
        self._last = 0.0
        self._step = 0
        self._compiling = False

    def move(self, path: str) -> None:
        """Write to another named pipe from now on, in a fork that ends with its parent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = open_parent_pipe(path)
        end_process_with_parent(self._descriptor)

    def compiling(self, compiling: bool) -> None:
        """Report whether the script compiles code."""
        self._compiling = compiling
        self._last = 0.0
        self.progress(self._step)

    def progress(self, step: int) -> None:
        """Report the script's progress, unless that was done just now."""
        self._step = step
        now = time.monotonic()
        if now - self._last < PROGRESS_INTERVAL:
            return
        self._last = now
        import torch

        ready = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        allocated = torch.cuda.memory_allocated() if ready else 0
        peak = torch.cuda.max_memory_allocated() if ready else 0
        self._write(ChildMessage(step, allocated, peak, compiling=self._compiling))

    def interrupted(self) -> None:
        """Report that Ctrl-C ended the script, before its trace is written."""
        self._write(ChildMessage(interrupted=True))

    def end(self, end: ScriptEnd, *, traced: bool, unsaved: str = "") -> None:
        """Report how the script ended, whether a trace was written, and why it is not in its own file."""
        self._write(ChildMessage(end=end, traced=traced, unsaved=unsaved, started=self.started))

    def _write(self, message: ChildMessage) -> None:
        if self._descriptor is None:
            return
        try:
            os.write(self._descriptor, msgspec.json.encode(message) + b"\n")
        except OSError:
            self._descriptor = None  # the parent has gone


def open_parent_pipe(path: str) -> int:
    """Return a descriptor that writes to memfit's named pipe; leave if memfit has ended."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        os._exit(TargetError.exit_code)
    os.set_blocking(descriptor, True)
    return descriptor


def signal_process_when_parent_ends(number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends.

    Strictly, when the thread that started this process ends; that thread waits for this process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def end_process_with_parent(progress: int) -> None:
    """Have the kernel kill this process when its parent ends; leave if it has ended."""
    signal_process_when_parent_ends(signal.SIGKILL)
    parent = select.poll()
    parent.register(progress, select.POLLERR)  # the parent alone holds the end that reads
    if parent.poll(0):
        os._exit(TargetError.exit_code)


def report_compilations(report: Callable[[bool], None]) -> None:
    """Call ``report`` with True when torch.compile begins to compile, and with False when it ends."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: report(True))
    callback_handler.register_end_callback(lambda _: report(False))
