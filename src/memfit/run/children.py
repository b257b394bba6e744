"""The processes that a script starts: have Python call ``followed.py`` in them, and read what they recorded.

The script's process puts a folder with a ``sitecustomize.py`` on ``PYTHONPATH``, which children inherit, and
Python imports it when it starts. A child that uses the GPU keeps one small file in the run's folder.
"""

import multiprocessing
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from memfit.records import ChildProcess, Figure
from memfit.run.child_settings import ChildSettings, write_settings

SITE = "sitecustomize"
"""The module that Python imports when it starts."""
SETTINGS = "settings.json"
"""Name of the file beside it that holds the run's settings."""
_SUFFIX = ".child"
_CODE = """
import sys
if sys.prefix == {prefix!r}:
    from memfit.run.followed import follow
    follow()
"""
_MOST_CHARACTERS = 80
"""Of a command that is shown."""


def follow_children(settings: ChildSettings, instead_of: ChildSettings | None = None) -> None:
    """Have the Python processes that this one starts run on the ghost, too, and record themselves.

    Another Python installation, which has another torch, is left alone.

    Args:
        settings: of the run.
        instead_of: those of the run that this process has been a part of before, if any.
    """
    site = _site(settings)
    site.mkdir(exist_ok=True)
    (site / SETTINGS).write_text(write_settings(settings))
    (site / f"{SITE}.py").write_text(_CODE.format(prefix=sys.prefix))
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in before if instead_of is None or path != str(_site(instead_of))]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), *others)))


def _site(settings: ChildSettings) -> Path:
    return Path(settings.folder) / "site"


def record_process(folder: Path, process: int, name: str, peak: Figure | None, error: str = "") -> None:
    """Record a process in the run's folder; the fields are those of ``ChildProcess``."""
    beside = folder / str(process)
    try:
        beside.write_bytes(msgspec.json.encode(ChildProcess(name, peak, error)))
        beside.replace(beside.with_suffix(_SUFFIX))
    except OSError:
        return  # memfit has ended, and its folder has gone


def forget_process(folder: Path, process: int) -> None:
    """Remove the record of a process."""
    (folder / f"{process}{_SUFFIX}").unlink(missing_ok=True)


def is_recorded(folder: Path, process: int) -> bool:
    """Return whether a process has been recorded."""
    return (folder / f"{process}{_SUFFIX}").exists()


def read_children(folder: Path) -> tuple[ChildProcess, ...]:
    """Return the processes that recorded themselves, in the order of their process IDs."""
    found = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: int(path.stem))
    return tuple(msgspec.json.decode(path.read_bytes(), type=ChildProcess) for path in found)


def name_of_this_process() -> str:
    """Return this process's name in ``multiprocessing``, or its command."""
    if multiprocessing.parent_process() is not None:
        return multiprocessing.current_process().name
    return command_name([sys.executable, *sys.orig_argv[1:]])


def command_name(command: Sequence[str]) -> str:
    """Return the name that a process is shown by: its command, without folders and shortened.

    >>> command_name(["/usr/bin/python", "worker.py", "--rank", "0"])
    'python worker.py --rank 0'
    """
    name = shlex.join([Path(command[0]).name, *command[1:]] if command else ["?"])
    return name if len(name) <= _MOST_CHARACTERS else f"{name[:_MOST_CHARACTERS]}..."
