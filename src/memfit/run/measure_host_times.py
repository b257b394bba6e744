"""How long this machine's host takes to issue a step: measured once, in a process on the ghost, and kept."""

import subprocess
from datetime import UTC, datetime

import msgspec

from memfit.atomic_files import write_output_file
from memfit.errors import TargetError
from memfit.ghost.build.torch_install import find_torch
from memfit.python_command import command_running_module
from memfit.records import HostTimes, HostUnits
from memfit.timing.saved_host_times import host_times_file

_TIMEOUT = 180  # seconds; the ghost may have to be built
_LAST_LINES = 5


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
