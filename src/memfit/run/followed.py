"""Python processes that the script starts: they run on the ghost too, and record themselves.

``started_processes.py`` has Python call ``follow`` when it starts. Nothing else happens in a process without
torch.
"""

import atexit
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path

from memfit.patching.after_import import after_import
from memfit.run.backend import GhostBackend
from memfit.run.child_settings import ChildSettings, read_settings
from memfit.run.parent_pipe import ParentPipe
from memfit.run.script_process import ScriptProcess
from memfit.run.started_processes import SETTINGS, SITE


def follow() -> None:
    """Load the ghost before this process imports torch, and record the process if it uses the GPU."""
    site = Path(sys.modules[SITE].__file__ or "").parent
    try:
        settings = read_settings((site / SETTINGS).read_text())
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
        after_import("torch", FollowedProcess(self._settings, backend).begin)
        return importlib.util.find_spec(fullname)


class FollowedProcess(ScriptProcess):
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
