"""Ctrl-C while a script runs: the terminal sends it to the script's process and to this one alike."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

_WRITING = "memfit: interrupted; writing what was recorded so far. Press Ctrl-C again to stop without it."


class Interruption:
    """Whether the user has pressed Ctrl-C, and for how long the script may still run."""

    def __init__(self, patience: float | None) -> None:
        """Begin without a Ctrl-C.

        Args:
            patience: the seconds that the script gets to end; None for as long as it takes; 0 if its trace is
                not needed.
        """
        self._patience = patience
        self._pressed: float | None = None
        self._announced = False

    @property
    def pressed(self) -> bool:
        """Whether the user has pressed Ctrl-C."""
        return self._pressed is not None

    def press(self) -> None:
        """Remember the first Ctrl-C.

        Raises:
            KeyboardInterrupt: it is the second.
        """
        if self.pressed:
            raise KeyboardInterrupt
        self._pressed = time.monotonic()

    def stop(self) -> None:
        """End all scripts as Ctrl-C does, because one of them has failed."""
        if not self.pressed:
            self._pressed = time.monotonic()

    def exhausted(self, *, writing: bool) -> bool:
        """Return whether the script has used up its time.

        Args:
            writing: whether the script has ended and writes its trace, which may take as long as it takes.
        """
        if self._pressed is None or self._patience is None:
            return False
        if time.monotonic() - self._pressed < self._patience:
            return False
        if not writing or not self._patience:
            return True
        if not self._announced:
            self._announced = True
            print(_WRITING, file=sys.stderr, flush=True)
        return False


_of_main_thread: ContextVar[Interruption | None] = ContextVar("_of_main_thread", default=None)
"""That of the thread that waits for this one."""


@contextmanager
def share_interruption_with_threads(interruption: Interruption) -> Iterator[None]:
    """Have an interruption also end scripts in threads that run with a copy of the block's context."""
    before = _of_main_thread.set(interruption)
    try:
        yield
    finally:
        _of_main_thread.reset(before)


@contextmanager
def leave_ctrl_c_to_script(patience: float | None) -> Iterator[Interruption]:
    """Leave the first Ctrl-C to the script; this process then reports on the run.

    A signal to this process alone (a scheduler's SIGTERM) ends the script as well.
    """
    interruption = Interruption(patience)

    def press(_number: int, _frame: FrameType | None) -> None:
        interruption.press()

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    ways = {signal.SIGINT: press, signal.SIGTERM: end, signal.SIGHUP: end}
    # The script ignores what this process ignores: Ctrl-C as a background job, and SIGHUP under nohup.
    handlers = {number: way for number, way in ways.items() if signal.getsignal(number) is not signal.SIG_IGN}
    try:
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    except ValueError:  # not the main thread, where Python allows no signal handlers
        yield _of_main_thread.get() or interruption
        return
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hold_ctrl_c_back() -> Iterator[None]:
    """Hold Ctrl-C back until the end of the block, for this thread and for processes started in the block.

    They start with it held back, and release it with ``release_ctrl_c`` when they are ready for it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def release_ctrl_c() -> None:
    """Act on Ctrl-C from now on, and on one that was held back."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
