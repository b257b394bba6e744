"""The process of the script: ``main()`` with ``SETTINGS.json SCRIPT.py ARGS...`` as arguments.

It loads the ghost, unless the script is recorded on a real GPU, runs the user's script as
``python SCRIPT.py`` would, and writes the trace. Nothing here imports torch before the script does, so that
environment variables that the script sets before importing torch take effect.
"""

import faulthandler
import os
import sys
from pathlib import Path

from memfit.errors import MemfitError
from memfit.patching.after_import import after_import
from memfit.records import ScriptEnd
from memfit.run.backend import CardBackend, GhostBackend
from memfit.run.child_settings import read_settings
from memfit.run.interruption import release_ctrl_c
from memfit.run.launchers import free_port
from memfit.run.parent_pipe import ParentPipe, end_with_parent, open_pipe
from memfit.run.script_process import ScriptProcess
from memfit.run.standby import StandbyFork
from memfit.run.started_processes import follow_started_processes


def main() -> None:
    """Run the script on the command line."""
    _, path, *command = sys.argv
    settings = read_settings(Path(path).read_text("ascii"))
    descriptor = open_pipe(settings.progress)
    end_with_parent(descriptor)
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
    process = ScriptProcess(tuple(command), settings, backend, parent)
    if settings.standby is not None:
        process.standby = StandbyFork(settings.standby, descriptor, process.go_on)
    after_import("torch", process.begin)
    if settings.ghost is not None:
        follow_started_processes(settings)
    release_ctrl_c()
    process.finish(process.script())
