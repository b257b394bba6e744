"""What Ctrl-C does in the command's own process.

import, parse     nothing exists yet: end at once
the command       raise KeyboardInterrupt, which removes temporary files on its way to main()
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


def ctrl_c_ends_at_once() -> None:
    """Make Ctrl-C end this process without a word, unless it ignores Ctrl-C, as a background job does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


class CtrlCRaises:
    """Makes Ctrl-C raise ``KeyboardInterrupt`` inside a block, if it ends the process at once outside.

    Python reports an exception in a finaliser and goes on. There, ``KeyboardInterrupt`` is raised once more.
    A library may raise an error of its own in its place: NumPy says that two arrays have no common dtype if
    Ctrl-C stops their comparison. An error that leaves the block after Ctrl-C becomes ``KeyboardInterrupt``.
    """

    def __enter__(self) -> None:
        """Begin the block."""
        self._ended = signal.getsignal(signal.SIGINT) is _end
        self._report = sys.unraisablehook
        self._pressed = False
        if self._ended:
            sys.unraisablehook = self._raise_again
            signal.signal(signal.SIGINT, self._raise)

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        """End the block."""
        if self._ended:
            signal.signal(signal.SIGINT, _end)
            sys.unraisablehook = self._report
        if self._pressed and isinstance(error, Exception):
            raise KeyboardInterrupt from error

    def _raise(self, number: int, frame: "FrameType | None") -> None:
        self._pressed = True
        signal.default_int_handler(number, frame)

    def _raise_again(self, ignored: "sys.UnraisableHookArgs") -> None:
        if isinstance(ignored.exc_value, KeyboardInterrupt):
            import threading

            # From another thread: raised here, it would be ignored as well.
            main = threading.main_thread().ident
            threading.Timer(0.001, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            self._report(ignored)
