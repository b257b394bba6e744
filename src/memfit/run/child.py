"""The processes on the ghost: the script's, and the Python processes that it starts.

``main()``, with ``SETTINGS.json SCRIPT.py ARGS...`` as arguments, loads the ghost, unless the script is
recorded on a real GPU, runs the user's script as ``python SCRIPT.py`` would, and writes the trace. Nothing
here imports torch before the script does, so that environment variables that the script sets before importing
torch take effect.

Python calls ``record_started_process()`` when another process starts (``follow_started_processes.py``), which
then records itself. Nothing else happens in a process without torch.
"""

import atexit
import faulthandler
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from memfit.errors import MemfitError
from memfit.patching.after_import import call_after_import
from memfit.records import ScriptEnd
from memfit.run.backend import CardBackend, GhostBackend
from memfit.run.child_start import ChildSettings, read_child_settings
from memfit.run.follow_started_processes import SETTINGS, SITE, follow_started_processes
from memfit.run.interruption import release_ctrl_c
from memfit.run.launchers import free_port
from memfit.run.parent_pipe import ParentPipe, end_process_with_parent, open_parent_pipe
from memfit.run.run_and_record_script import ScriptProcess
from memfit.run.standby_fork import StandbyForker


def main() -> None:
    """Run the script on the command line."""
    _, path, *command = sys.argv
    settings = read_child_settings(Path(path).read_text("ascii"))
    descriptor = open_parent_pipe(settings.progress)
    end_process_with_parent(descriptor)
    parent = ParentPipe(descriptor)
    faulthandler.enable()
    if settings.options.stdout_to_stderr:
        os.dup2(2, 1)
    if settings.options.allocator:
        os.environ["PYTORCH_ALLOC_CONF"] = settings.options.allocator
    try:
        backend = CardBackend() if settings.ghost is None else GhostBackend(settings.ghost, settings.options)
    except MemfitError as error:
        parent.end(ScriptEnd("refused", error.exit_code, str(error)), traced=False)
        os._exit(error.exit_code)
    if settings.options.rank.world_size > 1 and not settings.options.real_ranks:
        os.environ.update(settings.options.rank.variables(free_port()))
    process = ScriptProcess(settings.options.rank.arguments(command), settings, backend, parent)
    if settings.standby is not None:
        process.standby = StandbyForker(settings.standby, descriptor, process.go_on)
    call_after_import("torch", process.begin)
    if settings.ghost is not None:
        follow_started_processes(settings)
    release_ctrl_c()
    process.finish(process.script())


def record_started_process() -> None:
    """Load the ghost before this process imports torch, and record the process if it uses the GPU."""
    site = Path(sys.modules[SITE].__file__ or "").parent
    try:
        settings = read_child_settings((site / SETTINGS).read_text())
    except FileNotFoundError:
        return  # memfit has ended
    sys.meta_path.insert(0, _BeforeTorch(settings))
    run_hidden_sitecustomize(str(site))


def run_hidden_sitecustomize(site: str) -> None:
    """Run the ``sitecustomize.py`` that Python would have imported without ours."""
    others = [folder for folder in sys.path if folder != site]
    spec = importlib.machinery.PathFinder.find_spec(SITE, others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


class _BeforeTorch(importlib.abc.MetaPathFinder):
    """Prepares this process when it imports torch."""

    def __init__(self, settings: ChildSettings) -> None:
        self._settings = settings

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch" or self._settings.ghost is None:
            return None
        sys.meta_path.remove(self)
        backend = GhostBackend(self._settings.ghost, self._settings.options)
        call_after_import("torch", _FollowedProcess(self._settings, backend).begin)
        return importlib.util.find_spec(fullname)


class _FollowedProcess(ScriptProcess):
    """A Python process that the script started: it records its peak instead of writing a trace."""

    def __init__(self, settings: ChildSettings, backend: GhostBackend) -> None:
        super().__init__((), settings, backend, ParentPipe(None))
        self._script = None

    def begin(self) -> None:
        """Prepare torch, which has just been imported."""
        super().begin()
        atexit.register(self._record_at_exit)

    def _record_at_exit(self) -> None:
        if self._record is not None:
            self._record.end()
