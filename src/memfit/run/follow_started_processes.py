"""The processes that a script starts: Python programs, which record themselves, and others.

The script's process puts a folder with a ``sitecustomize.py`` on ``PYTHONPATH``, which children inherit, and
Python imports it when it starts: it calls ``record_started_process`` in ``child.py``. A child that uses the
GPU keeps one small file in the run's folder.

A process starts without this ``sitecustomize`` under ``python -I``, with an environment of its own, or in
another Python. Its memory map shows which CUDA runtime it has loaded; memfit names it, but cannot follow it.
A process that outlives the script is not followed either. Not found is one that does both: detaches itself,
and drops the environment variables that it inherited.
"""

import multiprocessing
import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec

from memfit.patching.patches import Patch, call_before
from memfit.records import ChildProcess, Figure
from memfit.run.child_start import ChildSettings, child_settings_as_json
from memfit.run.descendant_processes import descendants_of_process, processes_with_environment
from memfit.run.script_end import classify_script_end, note_process_ending_exception
from memfit.units import format_bytes

SITE = "sitecustomize"
"""The module that Python imports when it starts."""
SETTINGS = "settings.json"
"""Name of the file beside it that holds the run's settings."""
_SUFFIX = ".child"
_CODE = """
import sys
if sys.prefix == {prefix!r}:
    from memfit.run.child import record_started_process
    record_started_process()
"""
_MOST_CHARACTERS = 80
"""Of a command that is shown."""
_CUDA = Patch("torch.cuda", "_lazy_init", why="report a fork that uses the GPU, which fails")
_INTERVAL = 0.5
"""Seconds between two looks; importing torch takes longer."""
_TORCH = "/libtorch_cuda.so"
_STILL_RUNNING = "it still ran when the script ended, and may use the GPU later"
_HELPERS = re.compile(r"from multiprocessing|torch[./]_inductor|multiprocessing[./]|from memfit\.")
"""Commands of the processes that Python, PyTorch and memfit start as helpers."""


def follow_started_processes(settings: ChildSettings, instead_of: ChildSettings | None = None) -> None:
    """Have the Python processes that this one starts run on the ghost, too, and record themselves.

    Another Python installation, which has another torch, is left alone.

    Args:
        settings: of the run.
        instead_of: those of the run that this process has been a part of before, if any.
    """
    site = _site(settings)
    site.mkdir(exist_ok=True)
    (site / SETTINGS).write_text(child_settings_as_json(settings))
    (site / f"{SITE}.py").write_text(_CODE.format(prefix=sys.prefix))
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [path for path in inherited if instead_of is None or path != str(_site(instead_of))]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), *others)))


def _site(settings: ChildSettings) -> Path:
    return Path(settings.folder) / "site"


def _record_process(folder: Path, process: int, name: str, peak: Figure | None, error: str = "") -> None:
    """Record a process in the run's folder; the fields are those of ``ChildProcess``."""
    beside = folder / str(process)
    try:
        beside.write_bytes(msgspec.json.encode(ChildProcess(name, peak, error)))
        beside.replace(beside.with_suffix(_SUFFIX))
    except OSError:
        return  # memfit has ended, and its folder has gone


def read_started_processes(folder: Path) -> tuple[ChildProcess, ...]:
    """Return the processes that recorded themselves, in the order of their process IDs."""
    found = sorted(folder.glob(f"*{_SUFFIX}"), key=lambda path: int(path.stem))
    return tuple(msgspec.json.decode(path.read_bytes(), type=ChildProcess) for path in found)


def _name_of_this_process() -> str:
    """Return this process's name in ``multiprocessing``, or its command.

    A spawned process has its name before it unpickles its work, and its parent only then.

    Source: ``prepare`` and ``_main``, multiprocessing/spawn.py, CPython 3.11.
    """
    if (name := multiprocessing.current_process().name) != "MainProcess":
        return name
    return _command_name([sys.executable, *sys.orig_argv[1:]])


def _command_name(command: Sequence[str]) -> str:
    """Return the name that a process is shown by: its command, without folders and shortened.

    >>> _command_name(["/usr/bin/python", "worker.py", "--rank", "0"])
    'python worker.py --rank 0'
    """
    name = shlex.join([Path(command[0]).name, *command[1:]] if command else ["?"])
    return name if len(name) <= _MOST_CHARACTERS else f"{name[:_MOST_CHARACTERS]}..."


def record_gpu_use_after_fork(folder: Path) -> None:
    """Record this fork of a process that used the GPU if it uses the GPU, too: that fails, on a card as well.

    Source: ``_lazy_init``, torch/cuda/__init__.py, PyTorch 2.14.1.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda._initialized:
        return

    def record(*_: object) -> None:
        why = "CUDA cannot be used in a fork of a process that has used it"
        _record_process(folder, os.getpid(), _name_of_this_process(), None, why)

    _CUDA.install("_lazy_init", partial(call_before, record))


class StartedProcessRecorder:
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
        os._exit = call_before(lambda code=None, /: self._leave(SystemExit(code)), os._exit)
        note_process_ending_exception(self._leave)
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
        (self._folder / f"{os.getpid()}{_SUFFIX}").unlink(missing_ok=True)

    def _leave(self, error: BaseException) -> None:
        if os.getpid() != self._process:  # a fork of this process, such as a worker of a loader
            return
        end = classify_script_end(error)
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
        _record_process(self._folder, self._process, _name_of_this_process(), peak, failure)


def record_running_programs(settings: ChildSettings, script: int) -> None:
    """Record the Python programs that the script has started and that still run when it ends."""
    folder, own = Path(settings.folder), _command(script)
    if settings.ghost is None:
        return
    for process in _started(script, settings):
        command = _command(process)
        if not command or command == own:  # a fork, such as a worker of a loader
            continue
        if _may_train(command) and not (folder / f"{process}{_SUFFIX}").exists():
            _record_process(folder, process, _command_name(command), None, _STILL_RUNNING)


def _may_train(command: Sequence[str]) -> bool:
    """Return whether a command is a Python program that may yet use the GPU: no helper, and no known server.

    >>> _may_train(["python", "later.py"]), _may_train(["python3", "-u", "-m", "http.server"])
    (True, False)
    """
    if not Path(command[0]).name.startswith("python") or _HELPERS.search(" ".join(command)):
        return False
    module = next((name for flag, name in pairwise(command) if flag == "-m"), "")
    return module.partition(".")[0] not in {*sys.stdlib_module_names, "tensorboard"} and not any(
        Path(each).name == "tensorboard" for each in command
    )


def _started(script: int, settings: ChildSettings) -> set[int]:
    """Return the processes that the script has started, also those that have detached themselves from it."""
    inherits = settings.folder  # on PYTHONPATH
    return set(descendants_of_process(script)) | set(processes_with_environment(inherits))


def _command(process: int) -> list[str]:
    """Return the command line of a process; empty if it has just ended."""
    try:
        line = (Path("/proc") / str(process) / "cmdline").read_bytes()
    except OSError:
        return []
    return line.decode(errors="replace").split("\0")[:-1]


class UnfollowedProcesses:
    """Records the descendants of the script's process that load PyTorch, but not the ghost."""

    def __init__(self, script: int, settings: ChildSettings) -> None:
        self._script = script
        self._settings = settings
        self._known: set[int] = set()
        self._looked = time.monotonic()
        # A map shows the files behind links, such as that of a cache on another disk.
        self._ghost = Path(settings.ghost.build.library).resolve() if settings.ghost is not None else None

    def look(self) -> None:
        """Record those that run now; at most twice a second."""
        if self._ghost is None or time.monotonic() - self._looked < _INTERVAL:
            return
        for process in _started(self._script, self._settings):
            if process in self._known:
                continue
            try:
                maps = (Path("/proc") / str(process) / "maps").read_text(errors="replace")
            except OSError:  # it has just ended
                continue
            is_followed = str(self._ghost) in maps
            if is_followed or _TORCH in maps:
                self._known.add(process)
            command = _command(process)
            if not is_followed and _TORCH in maps and command:  # without one, it is ending: its map is torn
                _record_process(Path(self._settings.folder), process, _command_name(command), None)
        self._looked = time.monotonic()
