"""How long this machine's host takes to issue a step: measured once, in a process on the ghost, and kept."""

from datetime import UTC, datetime

import msgspec

from memfit.atomic_files import write_output_file
from memfit.ghost.build.torch_install import find_torch
from memfit.python_command import output_of_module
from memfit.records import HostTimes, HostUnits
from memfit.timing.saved_host_times import host_times_file

_TIMEOUT = 180  # seconds; the ghost may have to be built


def measure_host_times() -> HostTimes:
    """Measure, about 15 seconds, and keep the result in the cache folder.

    Raises:
        TargetError: the process on the ghost failed; the message quotes the last lines of its error.
        UnsuitableEnvironmentError: no PyTorch, or no compiler, or the cache folder cannot be written.
    """
    torch = find_torch().version
    printed = output_of_module("memfit.run.host_probe", "measure this machine's host", _TIMEOUT)
    one = msgspec.json.decode(printed, type=HostUnits)
    day = datetime.now(UTC).date().isoformat()
    times = HostTimes(one, f"memfit doctor --time, {day}, torch {torch}", measured=True)
    write_output_file(host_times_file(torch), msgspec.json.format(msgspec.json.encode(times)))
    return times
