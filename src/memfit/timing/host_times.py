"""How long this machine's host takes to issue a step: measured once, in a process on the ghost, and kept."""

import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from memfit.atomic_files import write_output_file
from memfit.errors import FileFormatError, TargetError
from memfit.ghost.build.torch_install import find_torch
from memfit.input_files import read_input_file
from memfit.native_build import cache_folder
from memfit.python_command import command_running_module
from memfit.records import HostTimes, HostUnits

_KIND = "host-times"
_MAX_FILE = 1 << 16  # bytes; a measurement takes some hundred
_CPU_INFO = Path("/proc/cpuinfo")
_TIMEOUT = 180  # seconds; the ghost may have to be built
_LAST_LINES = 5


def host_times_of_this_machine() -> HostTimes:
    """Return what was measured on this machine with this PyTorch; measure it now if it was not.

    Raises:
        MemfitError: as ``measure_host_times``.
    """
    return saved_host_times(find_torch().version) or measure_host_times()


def measure_host_times() -> HostTimes:
    """Measure, about 15 seconds, and keep the result in the cache folder.

    Raises:
        TargetError: the process on the ghost failed; the message quotes the last lines of its error.
        UnsuitableEnvironmentError: no PyTorch, or no compiler, or the cache folder cannot be written.
    """
    torch = find_torch().version
    try:
        done = subprocess.run(
            command_running_module("memfit.run.host_probe"),
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
        failed = done.returncode != 0 and "\n".join(done.stderr.splitlines()[-_LAST_LINES:])
    except subprocess.TimeoutExpired:
        failed = f"no answer within {_TIMEOUT} s"
    if failed:
        raise TargetError(f"Cannot measure this machine's host:\n{failed}")
    one = msgspec.json.decode(done.stdout, type=HostUnits)
    day = datetime.now(UTC).date().isoformat()
    times = HostTimes(one, f"memfit doctor --time, {day}, torch {torch}", measured=True)
    write_output_file(host_times_file(torch), msgspec.json.format(msgspec.json.encode(times)))
    return times


def host_times_file(torch_version: str) -> Path:
    """Return where the measurement of this processor with this Python and a version of torch is kept."""
    name = re.sub(r"[^\w.+]+", "_", f"{_processor()}-{torch_version}-{platform.python_version()}")
    return cache_folder(_KIND) / f"{name}.json"


def saved_host_times(torch_version: str) -> HostTimes | None:
    """Return what was measured on this machine with a version of torch; None without such a file."""
    try:
        content = read_input_file(host_times_file(torch_version), _MAX_FILE)
        return msgspec.json.decode(content, type=HostTimes)
    except (FileFormatError, msgspec.DecodeError):
        return None


def _processor() -> str:
    try:
        names = re.search(r"^model name\s*:\s*(.+)$", _CPU_INFO.read_text(), re.MULTILINE)
    except OSError:
        names = None
    return names[1] if names else platform.machine()
