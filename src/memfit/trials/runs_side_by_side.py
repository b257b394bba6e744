"""Run scripts side by side, on as many processors and in as much memory as this machine has.

A search has runs made that it will probably ask for, beside the one that it asks for.
"""

import os
import resource
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from memfit.records import ScriptEnd
from memfit.run.interruption import leave_ctrl_c_to_script, share_interruption_with_threads
from memfit.run.parent import ScriptProgress

Result = TypeVar("Result")
Wanted = TypeVar("Wanted", bound=Hashable)

_INTERVAL = 0.1  # seconds between two looks at whether the user has pressed Ctrl-C


def most_scripts_side_by_side() -> int:
    """Return how many scripts can run side by side if each takes as much memory as the largest so far."""
    return max(1, min(len(os.sched_getaffinity(0)), count_scripts_that_fit_in_memory()))


def count_scripts_that_fit_in_memory() -> int:
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


def run_scripts_side_by_side(calls: Sequence[Callable[[], Result]], most: int) -> list[Result]:
    """Make calls that run scripts, in threads, and return their results in the order of the calls.

    Raises:
        KeyboardInterrupt: the user pressed Ctrl-C. Here and below, no script runs any longer.
        BaseException: what a call raised first.
    """
    with (
        leave_ctrl_c_to_script(0.0) as interruption,
        share_interruption_with_threads(interruption),
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


class ProgressOfFirst:
    """Shows the progress of the first of several runs, and how many there are beside it."""

    def __init__(self, on_progress: Callable[[ScriptProgress], None]) -> None:
        self._on_progress = on_progress
        self._running: list[str] = []

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Count a run, by its name, among the others for as long as the block lasts."""
        self._running.append(what)
        try:
            yield
        finally:
            self._running.remove(what)

    def show(self, progress: ScriptProgress) -> None:
        """Show the progress of a run, if it is the first or the only one; any thread may call this."""
        running = tuple(self._running)
        if not running or progress.trying == running[0]:
            self._on_progress(replace(progress, beside=max(0, len(running) - 1)))


class RunsAhead(Generic[Wanted, Result]):
    """Makes runs side by side, and keeps those that a search has not asked for yet.

    A run that does not complete is not kept, and so is made again, alone, if the search asks for it: it may
    have failed because of the other one, which writes the same files.

    Args:
        run: makes a run, given what is wanted, such as a change, and its name.
        progress: what ``run`` reports its progress to.
    """

    def __init__(self, run: Callable[[Wanted, str], Result | ScriptEnd], progress: ProgressOfFirst) -> None:
        self._run, self._progress = run, progress
        self._kept: dict[Wanted, Result] = {}

    def run(self, wanted: Wanted, what: str) -> Result | ScriptEnd:
        """Return a run, and make it unless that has been done."""
        return self._kept.pop(wanted, None) or self._run(wanted, what)

    def make(self, wanted: Sequence[tuple[Wanted, str]]) -> None:
        """Make runs that will be, or may be, asked for, if this machine can run several side by side."""
        new = [each for each in wanted if each[0] not in self._kept]
        most = min(len(new), most_scripts_side_by_side())
        if most < 2:  # noqa: PLR2004 - one run has nothing beside it
            return
        results = run_scripts_side_by_side([partial(self._named, *each) for each in new], most)
        for (one, _), result in zip(new, results, strict=True):
            if not isinstance(result, ScriptEnd):
                self._kept[one] = result

    def _named(self, wanted: Wanted, what: str) -> Result | ScriptEnd:
        with self._progress.of(what):
            return self._run(wanted, what)
