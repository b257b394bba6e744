"""Start the process that runs a script."""

import subprocess
from pathlib import Path
from typing import Protocol

from memfit.python_command import python_command
from memfit.run.child_settings import ChildSettings, write_settings


class RunningScript(Protocol):
    """A process that runs a script; ``subprocess.Popen`` is one."""

    pid: int

    @property
    def returncode(self) -> int | None:
        """Return its exit code, negative for a signal; None until ``poll`` or ``wait`` has seen its end."""

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""

    def wait(self) -> int:
        """Wait for its end, and return its exit code."""

    def kill(self) -> None:
        """Kill it, if it runs."""


class StartScript(Protocol):
    """What starts a process that runs a script: ``start_script``, or a standby."""

    def __call__(self, command: tuple[str, ...], settings: ChildSettings, /) -> RunningScript:
        """Start the process."""


def settings_file(settings: ChildSettings) -> str:
    """Write the settings of a run into its folder, and return the path of the file."""
    file = Path(settings.folder) / "settings.json"
    file.write_text(write_settings(settings), "ascii")
    return str(file)


def start_script(
    command: tuple[str, ...], settings: ChildSettings, *, hidden: bool = False
) -> "subprocess.Popen[bytes]":
    """Start a process that runs a script.

    Args:
        command: the script's ``sys.argv``.
        settings: of the run.
        hidden: whether the script gets no input, and its output is hidden.
    """
    stream = subprocess.DEVNULL if hidden else None
    return subprocess.Popen(
        [*python_command("memfit.run.child"), settings_file(settings), *command],
        stdin=stream,
        stdout=stream,
        stderr=stream,
        pass_fds=() if settings.standby is None else (settings.standby,),
    )
