"""Threads of the script: memfit waits for them, and notes the exceptions that end them."""

import threading
import time
from collections.abc import Callable

from memfit.run.script import ended_by_memfit


def join_threads(timeout: float | None) -> None:
    """Wait for the threads that Python waits for, at most ``timeout`` seconds in total."""
    until = None if timeout is None else time.monotonic() + timeout
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join(None if until is None else max(0.0, until - time.monotonic()))


def noting_excepthook(
    original: Callable[[threading.ExceptHookArgs], object], noted: list[BaseException]
) -> Callable[[threading.ExceptHookArgs], object]:
    """Return a hook that notes the exceptions which end threads, and is silent where memfit ends them."""

    def hook(arguments: threading.ExceptHookArgs) -> object:
        if ended_by_memfit(arguments.exc_type):
            return None
        if arguments.exc_value is not None:
            noted.append(arguments.exc_value)
        return original(arguments)

    return hook
