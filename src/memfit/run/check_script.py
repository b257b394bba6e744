"""Check a script before it is run: what Python would refuse is refused here, as Python states it."""

import io
import re
import shlex
import tokenize
import traceback
import warnings
import zipfile
from pathlib import Path

from memfit.errors import TargetError, UsageError
from memfit.input_files import check_ordinary_file, read_input_file

_MAX_BYTES = 1 << 26
_PYTHON = re.compile(r"python[0-9.]*")


def is_package(path: Path) -> bool:
    """Return whether Python would run a path by its ``__main__.py``: a folder, or a zip (``zipapp``)."""
    return path.is_dir() or zipfile.is_zipfile(path)


def check_script(path: Path) -> None:
    """Check that a path leads to a script that Python accepts. Nothing of it is run.

    Raises:
        UsageError: there is no such script.
        FileFormatError: it cannot be read.
        TargetError: it is not valid Python.
    """
    if not path.exists():
        if _PYTHON.fullmatch(path.name):
            raise UsageError(f"No such script: {path}. Leave out {path}: memfit runs the script itself.")
        raise UsageError(f"No such script: {path}. Give the path as you would to python.")
    check_ordinary_file(path)
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook, not a script. Convert it, and delete IPython's own lines:\n"
            f"    pip install nbconvert && jupyter nbconvert --to python {shlex.quote(str(path))}\n"
            f"    sed -i '/^ *[%!]/d; /get_ipython/d' {shlex.quote(str(path.with_suffix('.py')))}"
        )
    if not is_package(path):
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
