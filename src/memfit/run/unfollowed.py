"""Processes that run PyTorch beside the script without the ghost: memfit can name them, but not follow them.

A process starts without memfit's ``sitecustomize`` under ``python -I``, with an environment of its own, or in
another Python. Its memory map shows which CUDA runtime it has loaded.
"""

import time
from pathlib import Path

from memfit.run.child_settings import ChildSettings
from memfit.run.children import command_name, record_process
from memfit.run.process_tree import descendants

_INTERVAL = 0.5
"""Seconds between two looks; importing torch takes longer."""
_TORCH = "/libtorch_cuda.so"


class UnfollowedProcesses:
    """Records the descendants of the script's process that load PyTorch, but not the ghost."""

    def __init__(self, script: int, settings: ChildSettings) -> None:
        self._script = script
        self._settings = settings
        self._known: set[int] = set()
        self._looked = time.monotonic()

    def look(self) -> None:
        """Record those that run now; at most twice a second."""
        if self._settings.ghost is None or time.monotonic() - self._looked < _INTERVAL:
            return
        for process in descendants(self._script):
            if process in self._known:
                continue
            folder = Path("/proc") / str(process)
            try:
                maps = (folder / "maps").read_text(errors="replace")
                command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
            except OSError:  # it has just ended
                continue
            is_followed = str(self._settings.ghost.build.library) in maps
            if is_followed or _TORCH in maps:
                self._known.add(process)
            if not is_followed and _TORCH in maps:
                record_process(Path(self._settings.folder), process, command_name(command), None)
        self._looked = time.monotonic()
