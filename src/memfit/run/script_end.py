"""The end of a script: why it ended, and what its process does before it ends."""

import atexit
import importlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from memfit.patching.patches import call_before
from memfit.records import ScriptEnd
from memfit.termination_signals import INTERRUPTED


def classify_script_end(error: BaseException) -> ScriptEnd:
    """Return how a script that raised an exception ended, judged by the whole chain of exceptions.

    A loop that catches the exception with which memfit ends it, and calls ``sys.exit(1)``, was still ended by
    memfit; a script that reraises out of memory as another error still ran out of memory; and a library that
    reports Ctrl-C as an error of its own was interrupted.
    """
    chain = _chain(error)
    for link in chain:
        if _ended_by_memfit(type(link)):
            return ScriptEnd(link.reason, 0)  # type: ignore[attr-defined]
    for link in chain:
        if isinstance(link, KeyboardInterrupt):
            return ScriptEnd("interrupted", INTERRUPTED, "KeyboardInterrupt", _innermost_user_line(link))
    failed = not isinstance(error, SystemExit) or bool(_exit_code(error))
    for link in chain:
        if _is_out_of_memory(link) and failed:
            return ScriptEnd("out of memory", 1, _summary(link), _innermost_user_line(link))
    if isinstance(error, SystemExit):
        return _end_of_exit(error)
    return ScriptEnd("exception", 1, _summary(error), _innermost_user_line(error))


def _ended_by_memfit(kind: type[BaseException]) -> bool:
    """Return whether memfit ended the script with an exception; by name, without importing PyTorch."""
    return any(base.__name__ == "EnoughStepsReached" for base in kind.__mro__)


def _is_out_of_memory(error: BaseException) -> bool:
    """Return whether PyTorch ran out of memory; without caching it raises CUDA's error in other words.

    Source: ``uncached_allocate`` in c10/cuda/CUDACachingAllocator.cpp, PyTorch 2.14.1.
    """
    if not type(error).__module__.startswith("torch"):
        return False
    return type(error).__name__ == "OutOfMemoryError" or str(error).startswith("CUDA error: out of memory")


def _summary(error: BaseException) -> str:
    return traceback.format_exception_only(error)[-1].strip()


def _end_of_exit(stop: SystemExit) -> ScriptEnd:
    """Return the end of a script that called ``sys.exit``; if it gave up, with its message and the line."""
    code = _exit_code(stop)
    if not code:
        return ScriptEnd("end", 0)
    message = "" if isinstance(stop.code, int) else str(stop.code)
    return ScriptEnd("end", code, message, _innermost_user_line(stop))


def _exit_code(stop: SystemExit) -> int:
    if stop.code is None:
        return 0
    return int(stop.code) & 0xFF if isinstance(stop.code, int) else 1


def _chain(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and not any(link is seen for seen in chain):
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _innermost_user_line(error: BaseException) -> str:
    from memfit.user_lines import is_user_file

    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if is_user_file(frame.f_code.co_filename)
    ]
    return lines[-1] if lines else ""


def join_script_threads(timeout: float | None) -> None:
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
        if _ended_by_memfit(arguments.exc_type):
            return None
        if arguments.exc_value is not None:
            noted.append(arguments.exc_value)
        return original(arguments)

    return hook


def hide_output() -> None:
    """Hide what this process prints, and give it no input."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)


def flush_output() -> None:
    """Write what Python has buffered."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or without a reader: Python itself exits silently then


def call_when_started_process_ends(end: Callable[[BaseException | None, bool], object]) -> None:
    """Call ``end`` when this process, which another program started, ends by itself.

    ``os._exit`` and signals end a process without the call. A process of ``multiprocessing`` has by then
    delivered what it put in queues.

    Args:
        end: called with the exception that ended the process, if one did, and whether it has been printed or
            reported to the program that started the process.

    Source: ``BaseProcess._bootstrap``, Lib/multiprocessing/process.py, Python 3.11.
    """
    if multiprocessing.parent_process() is None:
        _at_interpreter_end(end)
        return
    util: Any = importlib.import_module("multiprocessing.util")
    finish = util._exit_function

    def finish_and_end(*_: object) -> None:
        error = sys.exc_info()[1]
        finish()
        if isinstance(error, SystemExit) and error.code and error.__context__ is not None:
            end(error.__context__, True)  # mp.spawn has sent the exception to the process that called it
        else:
            end(error, False)

    util._exit_function = finish_and_end


def _at_interpreter_end(end: Callable[[BaseException | None, bool], object]) -> None:
    raised: list[BaseException] = []
    note_process_ending_exception(raised.append)

    def ended() -> None:
        atexit.unregister(ended)  # memfit then runs all exit handlers, and must not call this one again
        end(raised[-1] if raised else None, True)

    atexit.register(ended)


def note_process_ending_exception(note: Callable[[BaseException], None]) -> None:
    """Call ``note`` with the exception that ends this process: of ``sys.exit``, or an uncaught one."""
    sys.exit = call_before(lambda code=None, /: note(SystemExit(code)), sys.exit)
    sys.excepthook = call_before(lambda _kind, error, _trace: note(error), sys.excepthook)
