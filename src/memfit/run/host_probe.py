"""A process that measures, on the ghost, how long the host takes for one of each thing that a step has.

``main()`` prints the seconds, as JSON.
"""

import os
from dataclasses import replace

import msgspec

from memfit.devices import DEFAULT, find_device
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice
from memfit.ghost.load_ghost import load

_SECONDS, _ROUNDS = 6.0, 60


def main() -> None:
    """Measure, and print the seconds of one of each thing."""
    ghost = load(build_ghost())
    ghost.configure(GhostDevice.of(find_device(DEFAULT)))
    from memfit.run.host_work import (
        least_processor_times,
        seconds_of_cpu_gigabyte,
        seconds_of_one,
        small_networks,
        ways_to_run,
    )

    ways = [
        way for network, loss in small_networks() for way in ways_to_run(network, loss, [*network]).values()
    ]
    seconds = least_processor_times([way.run for way in ways], _SECONDS, _ROUNDS)
    one = seconds_of_one([way.counts for way in ways], seconds)
    os.write(1, msgspec.json.encode(replace(one, cpu_gigabytes=seconds_of_cpu_gigabyte())))
