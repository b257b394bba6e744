"""What the parent tells the process that runs the script."""

import json

import msgspec

from memfit.ghost.build.runtime_library import Build
from memfit.ghost.load import GhostDevice
from memfit.ghost.workspaces import WorkspaceSource
from memfit.records import DeviceUse


class GhostSettings(msgspec.Struct, frozen=True):
    """What a run on the ghost needs beyond what every run does."""

    build: Build
    stands_for: GhostDevice
    device: DeviceUse
    devices: int
    """How many of it the script sees; the first is recorded."""
    values: str
    """``ValueChoices`` as on the command line."""
    host_memory: bool
    """Pass over the filling of large CPU tensors."""
    weights: bool
    """Read the checkpoints that ``from_pretrained`` is asked for, where they are on this machine."""
    workspaces: WorkspaceSource = WorkspaceSource.CUDNN


class ChildSettings(msgspec.Struct, frozen=True):
    """One run of a script. Travels as JSON on the command line, before the script's own."""

    ghost: GhostSettings | None
    """What the ghost is; without it the script runs on this machine's own GPU."""
    module: bool
    """Whether a module is to be run, as after ``python -m``."""
    steps: int | None
    """Training steps after which the script is ended; None lets it come to its own end."""
    labels: bool
    stdout_to_stderr: bool
    """The script's standard output goes to standard error, because the result goes to standard output."""
    output: str = ""
    """Where the trace is written."""
    progress: int = -1
    """File descriptor for progress lines, or -1."""


def write_settings(settings: ChildSettings) -> str:
    """Return settings as JSON in ASCII; by the standard library, which can spell names that are not UTF-8."""
    return json.dumps(msgspec.to_builtins(settings, enc_hook=str))


def read_settings(text: str) -> ChildSettings:
    """Read what ``write_settings`` wrote."""
    return msgspec.convert(json.loads(text), ChildSettings, dec_hook=lambda kind, value: kind(value))
