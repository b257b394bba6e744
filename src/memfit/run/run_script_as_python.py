"""Check a script, run it as the interpreter's command line would, and classify its end."""

import atexit
import builtins
import importlib
import importlib.machinery
import io
import multiprocessing
import os
import re
import runpy
import shlex
import sys
import threading
import time
import tokenize
import traceback
import types
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memfit.errors import TargetError, UsageError
from memfit.input_files import check_ordinary_file_or_folder, read_input_file
from memfit.patching.patches import call_before
from memfit.records import ScriptEnd
from memfit.termination_signals import INTERRUPTED

_MAX_BYTES = 1 << 26
_PYTHON = re.compile(r"python[0-9.]*")
_MODEL_WITHOUT_SCRIPT = re.compile(r"(torchvision|timm|hf):")
"""How earlier versions took a model in place of a script."""


def run_script_as_main(command: tuple[str, ...], *, module: bool) -> None:
    """Run a script, a folder or zip with a ``__main__.py``, or a module, as Python does: as ``__main__``.

    Args:
        command: the script's path (or the module's name) and its arguments.
        module: run a module as ``python -m`` does.
    """
    target = command[0]
    sys.argv[:] = command
    if module:
        _first_on_path(str(Path.cwd()))
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    elif _is_package(Path(target)):
        runpy.run_path(target, run_name="__main__")  # puts it on the path itself
    else:
        _first_on_path(str(Path(target).resolve().parent))
        _run_file(os.path.abspath(target))  # noqa: PTH100 - like Python, follows no links


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, folder)


def _run_file(target: str) -> None:
    with io.open_code(target) as file:
        # PyTorch's history cannot hold file names that are not UTF-8.
        code = compile(file.read(), target.encode(errors="backslashreplace").decode(), "exec")
    main_module = types.ModuleType("__main__")
    main_module.__dict__.update(
        __file__=target,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", target),
        __cached__=None,
    )
    sys.modules["__main__"] = main_module
    exec(code, main_module.__dict__)  # noqa: S102 - running the user's script is the point


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


def print_exception_as_python_does(error: BaseException, caller: str) -> None:
    """Print what Python would print for a script that raised, with a traceback that begins in the script.

    Args:
        error: what it raised.
        caller: the file of memfit's that ran the script.
    """
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (caller, __file__):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


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


def _is_package(path: Path) -> bool:
    """Return whether Python would run a path by its ``__main__.py``: a folder, or a zip (``zipapp``)."""
    return path.is_dir() or zipfile.is_zipfile(path)


def check_script_path(path: Path) -> None:
    """Check that a path leads to a script that Python accepts. Nothing of it is run.

    Raises:
        UsageError: there is no such script.
        FileFormatError: it cannot be read.
        TargetError: it is not valid Python.
    """
    if not path.exists():
        if _PYTHON.fullmatch(path.name):
            raise UsageError(f"No such script: {path}. Leave out {path}: memfit runs the script itself.")
        if _MODEL_WITHOUT_SCRIPT.match(str(path)):
            raise UsageError(
                f"No such script: {path}. memfit no longer runs models without a script. Write a script of "
                "ten lines or a job (docs/planning.md), or call memfit.estimate(model, inputs)."
            )
        raise UsageError(f"No such script: {path}. Give the path as you would to python.")
    check_ordinary_file_or_folder(path)
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook, not a script. Convert it, and delete IPython's own lines:\n"
            f"    pip install nbconvert && jupyter nbconvert --to python {shlex.quote(str(path))}\n"
            f"    sed -i '/^ *[%!]/d; /get_ipython/d' {shlex.quote(str(path.with_suffix('.py')))}"
        )
    if not _is_package(path):
        _check_source(path)
    elif path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UsageError(f"{path} is a folder without a __main__.py. Give the path of the script.")
        _check_source(path / "__main__.py")


def _check_source(path: Path) -> None:
    source = read_input_file(path, _MAX_BYTES)
    try:
        _check_encoding(source)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the script's process shows them
            compile(source, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        lines = traceback.format_exception_only(error)
        stated = "".join(lines).rstrip()
        raise TargetError(f"Python refuses {path}:{' ' if len(lines) == 1 else chr(10)}{stated}") from None


def _check_encoding(source: bytes) -> None:
    """Check what ``compile`` does not when it gets bytes: comments, too, must be in the declared encoding.

    Raises:
        SyntaxError: a byte is not.
    """
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    except SyntaxError:  # no such encoding, which compile says; or these lines are not UTF-8
        encoding = "utf-8"
    try:
        source.decode(encoding)
    except UnicodeDecodeError as error:
        line = source.count(b"\n", 0, error.start) + 1
        raise SyntaxError(
            f"line {line} contains the byte 0x{source[error.start]:02x}, which is not {encoding}. Declare "
            "the file's encoding on its first line (https://peps.python.org/pep-0263)."
        ) from None
