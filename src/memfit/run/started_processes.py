"""The processes that a script starts: have Python call ``followed.py`` in them, and read what they recorded.

The script's process puts a folder with a ``sitecustomize.py`` on ``PYTHONPATH``, which children inherit, and
Python imports it when it starts. A child that uses the GPU keeps one small file in the run's folder.
"""

import multiprocessing
import os
import shlex
import sys
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from memfit.patching.patches import Patch, before
from memfit.records import ChildProcess, Figure
from memfit.run.child_settings import ChildSettings, write_settings
from memfit.run.script import end_of
from memfit.units import format_bytes

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
_CUDA = Patch("torch.cuda", "_lazy_init", why="report a fork that uses the GPU, which fails")


def follow_started_processes(settings: ChildSettings, instead_of: ChildSettings | None = None) -> None:
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
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in inherited if instead_of is None or path != str(_site(instead_of))]
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


def read_started_processes(folder: Path) -> tuple[ChildProcess, ...]:
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


def record_failing_fork(folder: Path) -> None:
    """Record this fork of a process that used the GPU if it uses the GPU, too: that fails, on a card as well.

    Source: ``_lazy_init``, torch/cuda/__init__.py, PyTorch 2.14.1.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda._initialized:
        return

    def record(*_: object) -> None:
        why = "CUDA cannot be used in a fork of a process that has used it"
        record_process(folder, os.getpid(), name_of_this_process(), None, why)

    _CUDA.install("_lazy_init", partial(before, record))


class ProcessRecord:
    """Records in the run's folder what this process has held at most, and how it failed.

    It does so from its first use of the GPU on, not only at its end: it may be killed, or leave by
    ``os._exit``.
    """

    def __init__(self, folder: Path, context: Figure) -> None:
        """Describe what is recorded; ``context`` is that of the device."""
        self._folder = folder
        self._context = context
        self._process = 0
        self._written: tuple[int, str] | None = None
        self._shortage = ""  # the allocation that failed last
        self._failure = ""

    def begin(self) -> None:
        """Record that this process uses the GPU and, from now on, how it fails."""
        import torch

        self._process = os.getpid()
        torch._C._cuda_attach_out_of_memory_observer(self._ran_out)  # type: ignore[attr-defined]
        sys.exit, os._exit = self._noted(sys.exit), self._noted(os._exit)
        sys.excepthook = self._noted_exception(sys.excepthook)
        self._write()

    def update(self) -> None:
        """Record what this process has held so far; it goes on, whatever failed before."""
        self._shortage = self._failure = ""
        self._write()

    def end(self) -> None:
        """Record that this process ends."""
        self._shortage = ""
        self._write()

    def withdraw(self) -> None:
        """Record this process no more, and forget what was recorded: it is a rank."""
        self._process = 0
        forget_process(self._folder, os.getpid())

    def _leave(self, error: BaseException) -> None:
        if os.getpid() != self._process:  # a fork of this process, such as a worker of a loader
            return
        end = end_of(error)
        if end.exit_code:
            raised = "" if end.reason == "out of memory" else end.exception
            self._failure = raised or self._shortage or end.exception or f"exit code {end.exit_code}"
        self.end()

    def _ran_out(self, _device: int, requested: int, _total: int, free: int) -> None:
        self._shortage = f"out of memory: {format_bytes(requested)} requested, {format_bytes(free)} free"
        self._write()

    def _write(self) -> None:
        import torch

        if os.getpid() != self._process:
            return
        held = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
        failure = self._failure or self._shortage
        if self._written == (held, failure):
            return
        self._written = held, failure
        peak = Figure(held + self._context.bytes, self._context.provenance, "reserved + CUDA context")
        record_process(self._folder, self._process, name_of_this_process(), peak, failure)

    def _noted(self, leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        """Return a function that ends this process as ``leave`` does, and records an exit code."""

        def noted(code: object = None, /) -> NoReturn:
            self._leave(SystemExit(code))
            leave(code)

        return noted

    def _noted_exception(self, hook: Callable[..., object]) -> Callable[..., object]:
        def excepthook(
            kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
        ) -> None:
            self._leave(error)
            hook(kind, error, trace)

        return excepthook
