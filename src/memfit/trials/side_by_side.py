"""Run scripts side by side, on as many processors and in as much memory as this machine has."""

import os
import resource
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from pathlib import Path
from typing import TypeVar

from memfit.run.interruption import script_handles_ctrl_c, shared_with_threads

Result = TypeVar("Result")

_INTERVAL = 0.1  # seconds between two looks at whether the user has pressed Ctrl-C


def most_side_by_side() -> int:
    """Return how many scripts can run side by side if each takes as much memory as the largest so far."""
    return max(1, min(len(os.sched_getaffinity(0)), most_in_memory()))


def most_in_memory() -> int:
    """Return how many more scripts there is memory for if each takes as much as the largest so far."""
    largest = 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # Linux counts in KiB
    return _available_memory() // max(largest, 1)


def _available_memory() -> int:
    """Return the bytes of host memory that processes can still take; 0 if the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return 0
    return 1024 * next((int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), 0)


def side_by_side(calls: Sequence[Callable[[], Result]], most: int) -> list[Result]:
    """Make calls that run scripts, in threads, and return their results in the order of the calls.

    Args:
        calls: the calls.
        most: how many are made at once.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C. Here and below, no script runs any longer.
        BaseException: what a call raised first.
    """
    with (
        script_handles_ctrl_c(0.0) as interruption,
        shared_with_threads(interruption),
        ThreadPoolExecutor(most) as threads,
    ):
        futures = [threads.submit(copy_context().run, call) for call in calls]
        try:
            unfinished: set[Future[Result]] = set(futures)
            while unfinished and not interruption.pressed:
                done, unfinished = wait(unfinished, _INTERVAL, FIRST_COMPLETED)
                for future in done:
                    future.result()
        except BaseException:
            interruption.stop()
            raise
    if interruption.pressed:
        raise KeyboardInterrupt
    return [future.result() for future in futures]
