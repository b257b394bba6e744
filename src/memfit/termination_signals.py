"""What Ctrl-C does in the command's own process, and what SIGTERM and SIGHUP do.

import, parse     nothing exists yet: end at once
the command       raise KeyboardInterrupt or SystemExit, which removes temporary files on its way to main()
exit              everything is written: end at once

Without this, Python prints a traceback for a Ctrl-C before main() and after it. This module imports next to
nothing: Ctrl-C may come during its import, too.
"""

import os
import sys

TYPE_CHECKING = False  # of typing, whose import would take too long
if TYPE_CHECKING:
    import signal
    from types import FrameType
else:
    import _signal as signal  # what signal itself adds to it imports enum, which takes milliseconds

INTERRUPTED = 130
"""The exit code of a program ended by Ctrl-C."""


def _end(_number: int, _frame: object) -> None:
    os._exit(INTERRUPTED)


def exit_silently_on_ctrl_c() -> None:
    """Make Ctrl-C end this process without a word, unless it ignores Ctrl-C, as a background job does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


class SignalsAsExceptions:
    """Makes signals raise inside a block, so that it removes its temporary files and ends its processes.

    Ctrl-C raises ``KeyboardInterrupt`` if it ends the process at once outside; a scheduler's SIGTERM and a
    closed terminal's SIGHUP raise ``SystemExit``. A signal that the process ignores stays ignored: SIGHUP
    under ``nohup``.

    Python reports an exception in a finaliser and goes on. There, the signal is sent once more. A library may
    raise an error of its own in its place: NumPy says that two arrays have no common dtype if Ctrl-C stops
    their comparison. An error that leaves the block after a signal becomes that signal's exception.
    """

    def __enter__(self) -> None:
        """Begin the block."""
        replaced = {signal.SIGINT: _end, signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
        self._before = {each: old for each, old in replaced.items() if signal.getsignal(each) == old}
        self._report = sys.unraisablehook
        self._received: int | None = None
        sys.unraisablehook = self._on_unraisable
        for each in self._before:
            signal.signal(each, self._raise)

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        """End the block."""
        for each, old in self._before.items():
            signal.signal(each, old)
        sys.unraisablehook = self._report
        if self._received is not None and isinstance(error, Exception):
            raise _exception(self._received) from error

    def _raise(self, number: int, frame: "FrameType | None") -> None:
        self._received = number
        while frame is not None and frame.f_code is not SignalsAsExceptions._on_unraisable.__code__:
            frame = frame.f_back
        if frame is None:
            raise _exception(number)
        self._send_again(number)  # Python ignores what its hook raises

    def _on_unraisable(self, ignored: "sys.UnraisableHookArgs") -> None:
        if self._received is not None and isinstance(ignored.exc_value, KeyboardInterrupt | SystemExit):
            self._send_again(self._received)
        else:
            self._report(ignored)

    def _send_again(self, number: int) -> None:
        import threading

        # From another thread, and later: raised here, it would be ignored as well.
        main = threading.main_thread().ident
        threading.Timer(0.001, signal.pthread_kill, (main, number)).start()


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
