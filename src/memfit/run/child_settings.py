"""What the parent passes to the process that runs the script."""

import json

import msgspec

from memfit.ghost.build.runtime_library import Build
from memfit.ghost.device import GhostDevice
from memfit.records import DeviceUse
from memfit.run.options import RunOptions


class GhostSettings(msgspec.Struct, frozen=True):
    """The ghost that the options ask for: built, and with its device looked up."""

    build: Build
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
    """Where ranks ask for others (``ghost/ranks/exchanged_objects.py``); empty if there are no others."""
    standby: int | None = None
    """Descriptor of the socket of the script's standby (``standby.py``); None if there is to be none."""


def write_settings(settings: ChildSettings) -> str:
    """Return settings as ASCII JSON.

    Written with the standard library, which can represent file names that are not UTF-8.
    """
    return json.dumps(msgspec.to_builtins(settings, enc_hook=str))


def read_settings(text: str) -> ChildSettings:
    """Read what ``write_settings`` wrote."""
    return msgspec.convert(json.loads(text), ChildSettings, dec_hook=lambda kind, value: kind(value))
