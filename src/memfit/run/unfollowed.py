"""Processes that run beside the script and that memfit can name, but not follow.

A process starts without memfit's ``sitecustomize`` under ``python -I``, with an environment of its own, or in
another Python. Its memory map shows which CUDA runtime it has loaded. A process that outlives the script is
not followed either.

Not found is one that does both: detaches itself, and drops the environment variables that it inherited.
"""

import re
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from memfit.run.child_settings import ChildSettings
from memfit.run.process_tree import descendants, with_environment
from memfit.run.started_processes import command_name, is_recorded, record_process

_INTERVAL = 0.5
"""Seconds between two looks; importing torch takes longer."""
_TORCH = "/libtorch_cuda.so"
_STILL_RUNNING = "it still ran when the script ended, and may use the GPU later"
_HELPERS = re.compile(r"from multiprocessing|torch[./]_inductor|multiprocessing[./]|from memfit\.")
"""Commands of the processes that Python, PyTorch and memfit start as helpers."""


def record_running(settings: ChildSettings, script: int) -> None:
    """Record the Python programs that the script has started and that still run when it ends."""
    folder, own = Path(settings.folder), _command(script)
    if settings.ghost is None:
        return
    for process in _started(script, settings):
        command = _command(process)
        if not command or command == own:  # a fork, such as a worker of a loader
            continue
        if _may_train(command) and not is_recorded(folder, process):
            record_process(folder, process, command_name(command), None, _STILL_RUNNING)


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
    return set(descendants(script)) | set(with_environment(inherits))


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
                record_process(Path(self._settings.folder), process, command_name(command), None)
        self._looked = time.monotonic()
