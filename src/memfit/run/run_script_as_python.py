"""Check a script, and run it as the interpreter's command line would."""

import builtins
import importlib
import importlib.machinery
import io
import os
import re
import runpy
import shlex
import sys
import tokenize
import traceback
import types
import warnings
import zipfile
from pathlib import Path

from memfit.errors import TargetError, UsageError
from memfit.input_files import check_ordinary_file_or_folder, read_input_file
from memfit.user_lines import line_of_error

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


def print_exception_as_python_does(error: BaseException, caller: str, *, planned: bool = False) -> None:
    """Print what Python would print for a script that raised, with a traceback that begins in the script.

    Args:
        error: what it raised.
        caller: the file of memfit's that ran the script.
        planned: whether it ran under a plan, which may not suit it: a refusal has no traceback.
    """
    if planned and isinstance(error, UsageError):
        print(f"memfit: NOT APPLIED at {line_of_error(error)}: {error}", file=sys.stderr)
        return
    if isinstance(error, SystemExit):
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (caller, __file__):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


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
    """Check what ``compile`` does not when it gets bytes: comments, too, must be in the declared encoding."""
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
