"""Find the lines that are being executed: of the user's script, and of the packages that it calls."""

import functools
import os
import re
import site
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from traceback import walk_tb
from types import FrameType

GENERATED = re.compile(
    r"<eval_with_key>.*|.*[/\\](?:torchinductor_[^/\\]*|compiled-graphs[/\\]inductor[^/\\]*)[/\\].*",
    re.DOTALL,
)
"""Files that torch.compile writes: by default to the temporary folder, under memfit to memfit's cache."""

_OWN = f"{Path(__file__).parent}{os.sep}"


def innermost_user_line(start: FrameType | None = None) -> str:
    """Return the innermost line of Python code outside PyTorch, memfit and the standard library.

    A line outside ``site-packages`` takes precedence: a loss computed inside ``transformers`` belongs to the
    line of the script that called it. Without one, return the innermost line of an installed package.

    Args:
        start: frame to search outwards from; the caller's by default.

    Returns:
        ``file:line``, or an empty string if Python has no such frame (on PyTorch's autograd thread).

    >>> innermost_user_line().endswith(":1")  # this line, as doctest numbers it
    True
    """
    user, installed = _innermost(frame_locations(start or sys._getframe(1)))
    return user or installed


def warn_user(message: str) -> None:
    """Warn at the innermost line of the user's code; without one, at the innermost line outside memfit.

    A warning that counts frames (``stacklevel``) names a line of memfit's when a call takes another way.
    """
    frame: FrameType | None = sys._getframe(1)
    outside = user = None
    while frame is not None and user is None:
        kind = _kind(frame.f_code.co_filename)
        user = frame if kind == "user" else None
        if outside is None and not is_memfit_file(frame.f_code.co_filename):
            outside = frame
        frame = frame.f_back
    at = user or outside or sys._getframe(1)
    warnings.warn_explicit(
        message,
        UserWarning,
        at.f_code.co_filename,
        at.f_lineno,
        at.f_globals.get("__name__", "<unknown>"),
        at.f_globals.setdefault("__warningregistry__", {}),
    )


def user_line_with_package_line(lines: Iterable[tuple[str, int]]) -> str:
    """Return the innermost line of the user's code, with the line of an installed package that it called.

    Returns:
        ``/home/ada/train.py:65, in trl/trainer/grpo_trainer.py:1887``; empty as for ``innermost_user_line``.
    """
    user, installed = _innermost(lines)
    return f"{user}, in {_below_package_root(installed)}" if user and installed else user or installed


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error has passed, without folders, or nothing."""
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    user, _, _ = user_line_with_package_line(reversed(lines)).partition(", in ")
    return innermost_line_of_place(user)


def innermost_line_of_place(place: str) -> str:
    """Return the innermost line of a place, without folders; empty for a place that is no line.

    >>> innermost_line_of_place("/home/ada/train.py:65, in trl/trainer/grpo_trainer.py:1887")
    'grpo_trainer.py:1887'
    >>> innermost_line_of_place("/home/ada/train.py:65"), innermost_line_of_place("layers.0")
    ('train.py:65', '')
    """
    line = place.rpartition(", in ")[2].rpartition(os.sep)[2]
    return line if re.fullmatch(r".+:[0-9]+", line) else ""


def frame_locations(start: FrameType | None = None) -> Iterator[tuple[str, int]]:
    """Yield file and line of a frame, the caller's by default, and of all frames around it."""
    frame: FrameType | None = start or sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _innermost(lines: Iterable[tuple[str, int]]) -> tuple[str, str]:
    """Return the innermost line of the user's code, and the innermost line of a package that it called."""
    installed = ""
    for file, line in lines:
        kind = _kind(file)
        if kind == "user":
            return f"{file}:{line}", installed
        if kind == "installed" and not installed:
            installed = f"{file}:{line}"
    return "", installed


def _below_package_root(file: str) -> str:
    """Shorten the path of an installed file to that below ``site-packages``."""
    return file.removeprefix(next((root for root in _package_roots() if file.startswith(root)), ""))


def is_user_file(file: str) -> bool:
    """Return whether a source file is the user's own: outside the standard library and installed packages.

    >>> is_user_file("/home/ada/train.py"), is_user_file(re.__file__)
    (True, False)
    """
    return _kind(file) == "user"


def is_memfit_file(file: str) -> bool:
    """Return whether a source file is memfit's.

    >>> is_memfit_file(__file__), is_memfit_file(re.__file__)
    (True, False)
    """
    return file.startswith(_OWN)


@functools.cache
def _kind(file: str) -> str:
    """Return the origin of a source file: ``user``, ``installed`` (a third-party package) or ``internal``."""
    # Generated code and python -c have no source file.
    if file.startswith((_OWN, "<frozen", "<string>")) or GENERATED.fullmatch(file):
        return "internal"
    for root in _package_roots():
        if file.startswith(root):
            return "internal" if file.startswith(f"{root}torch{os.sep}") else "installed"
    return "internal" if file.startswith(_standard_library()) else "user"


@functools.cache
def _package_roots() -> tuple[str, ...]:
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()}
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:  # wherever it is installed, including --target folders
        paths.add(str(Path(torch.__file__).parents[1]))
    return tuple(path + os.sep for path in paths | {*site.getsitepackages()} if path)


@functools.cache
def _standard_library() -> tuple[str, ...]:
    return tuple({sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep})
