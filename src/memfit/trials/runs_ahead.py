"""Runs of a script that are made before a search asks for them, beside the one that it asks for."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from memfit.analysis.trial_result import RunTrial, TrialResult
from memfit.records import Change, ScriptEnd
from memfit.run.parent import Progress
from memfit.trials.side_by_side import most_side_by_side, side_by_side


class ProgressOfFirst:
    """Shows the progress of the first of several runs, and how many there are beside it.

    Args:
        on_progress: as for ``run_script``.
    """

    def __init__(self, on_progress: Callable[[Progress], None]) -> None:
        self._on_progress = on_progress
        self._running: list[str] = []

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        """Count a run among the others for as long as the block lasts.

        Args:
            what: the run's name.
        """
        self._running.append(what)
        try:
            yield
        finally:
            self._running.remove(what)

    def show(self, progress: Progress) -> None:
        """Show the progress of a run, if it is the first or the only one; any thread may call this."""
        running = tuple(self._running)
        if not running or progress.trying == running[0]:
            self._on_progress(replace(progress, beside=max(0, len(running) - 1)))


class RunsAhead:
    """Makes runs side by side, and keeps those that a search has not asked for yet.

    A run that does not complete is not kept, and so is made again, alone, if the search asks for it: it may
    have failed because of the other one, which writes the same files.

    Args:
        run: what the search runs the script with.
        progress: what ``run`` reports its progress to.
    """

    def __init__(self, run: RunTrial, progress: ProgressOfFirst) -> None:
        self._run, self._progress = run, progress
        self._kept: dict[Change, TrialResult] = {}

    def run(self, change: Change, what: str) -> TrialResult | ScriptEnd:
        """Return the run under a change, and make it unless that has been done."""
        return self._kept.pop(change, None) or self._run(change, what)

    def make(self, wanted: Sequence[tuple[Change, str]]) -> None:
        """Make runs that will be, or may be, asked for, if this machine can run several side by side.

        Args:
            wanted: the change and the name of each.
        """
        new = [(change, what) for change, what in wanted if change not in self._kept]
        most = min(len(new), most_side_by_side())
        if most < 2:  # noqa: PLR2004 - one run has nothing beside it
            return
        results = side_by_side([partial(self._named, *each) for each in new], most)
        for (change, _), result in zip(new, results, strict=True):
            if isinstance(result, TrialResult):
                self._kept[change] = result

    def _named(self, change: Change, what: str) -> TrialResult | ScriptEnd:
        with self._progress.of(what):
            return self._run(change, what)
