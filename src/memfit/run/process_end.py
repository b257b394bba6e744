"""Call a function when this process ends, with the exception that ended it."""

import atexit
import importlib
import multiprocessing
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn


def at_process_end(end: Callable[[BaseException | None, bool], object]) -> None:
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
    leave, hook = sys.exit, sys.excepthook
    raised: list[BaseException] = []

    def noted_exit(code: object = None, /) -> NoReturn:
        raised[:] = [SystemExit(code)]
        leave(code)  # type: ignore[arg-type]

    def noted_exception(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        raised[:] = [error]
        hook(kind, error, trace)

    sys.exit, sys.excepthook = noted_exit, noted_exception

    def ended() -> None:
        atexit.unregister(ended)  # memfit runs the exit handlers itself, of which this is one
        end(raised[0] if raised else None, True)

    atexit.register(ended)
