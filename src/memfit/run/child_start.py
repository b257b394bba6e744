"""What the parent passes to the process that runs the script, and how it starts that process."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from memfit.ghost.build.runtime_library import BuiltGhost
from memfit.ghost.ghost_device import GhostDevice
from memfit.python_command import command_running_module
from memfit.records import DeviceUse
from memfit.run.descendant_processes import kill_descendants
from memfit.run.options import RunOptions


class GhostSettings(msgspec.Struct, frozen=True):
    """The ghost that the options ask for: built, and with its device looked up."""

    build: BuiltGhost
    stands_for: GhostDevice
    device: DeviceUse
    visible_devices: int
    """How many such devices the script sees. memfit records the first."""
    shown_memory: int | None = None
    """Bytes that PyTorch reports to the script as the device's memory; None for the real figure."""


class ChildSettings(msgspec.Struct, frozen=True):
    """One run of a script. Travels as JSON in a file: a command line shows in the list of processes."""

    options: RunOptions
    ghost: GhostSettings | None
    """None runs the script on this machine's own GPU."""
    output: str
    """Where the child writes the trace."""
    fallback: str
    """Where it writes the trace if it cannot write ``output``."""
    folder: str
    """The run's temporary folder. Processes that the script starts record themselves there."""
    progress: str
    """Named pipe that the child writes its progress to."""
    asks: str = ""
    """Where ranks ask for others (``ghost/ranks/object_exchange_files.py``); empty if there are no others."""
    standby: int | None = None
    """Descriptor of the socket of the script's standby (``standby_fork.py``); None if there is to be none."""


def child_settings_as_json(settings: ChildSettings) -> str:
    """Return settings as ASCII JSON.

    Written with the standard library, which can represent file names that are not UTF-8.
    """
    return json.dumps(msgspec.to_builtins(settings, enc_hook=str))


def read_child_settings(text: str) -> ChildSettings:
    """Read what ``child_settings_as_json`` wrote."""
    return msgspec.convert(json.loads(text), ChildSettings, dec_hook=lambda kind, value: kind(value))


class ScriptSubprocess(Protocol):
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


def kill_script(process: ScriptSubprocess) -> None:
    """Kill a script's process with all that it started, unless it has ended; wait for its end."""
    if process.poll() is None:
        kill_descendants(process.pid)
        process.kill()
    process.wait()


StartScript = Callable[[tuple[str, ...], ChildSettings], ScriptSubprocess]
"""What starts a process that runs a script, by its command: ``start_script``, or a standby."""


def write_child_settings_file(settings: ChildSettings) -> str:
    """Write the settings of a run into its folder, and return the path of the file."""
    file = Path(settings.folder) / "settings.json"
    file.write_text(child_settings_as_json(settings), "ascii")
    return str(file)


def start_script(
    command: tuple[str, ...], settings: ChildSettings, *, hidden: bool = False
) -> "subprocess.Popen[bytes]":
    """Start a process that runs a script."""
    stream = subprocess.DEVNULL if hidden else None
    return subprocess.Popen(
        [*command_running_module("memfit.run.child"), write_child_settings_file(settings), *command],
        stdin=stream,
        stdout=stream,
        stderr=stream,
        pass_fds=() if settings.standby is None else (settings.standby,),
    )
