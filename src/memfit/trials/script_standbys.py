"""Which runs of a script can go on from the standby of an earlier run, without starting the script again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from threading import Lock
from types import TracebackType
from typing import Self

from memfit.records import Change
from memfit.run.child_settings import GhostSettings
from memfit.run.options import RunOptions
from memfit.run.start_script import StartScript, start_script
from memfit.trials.forked_runs import Standby
from memfit.trials.side_by_side import most_in_memory

_LATE_STRATEGIES = {"checkpointing", "compilation", "offload", "optimizer_state"}
"""Strategies that change nothing before a model is called."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """A run of a script, as far as its beginning may depend on it."""

    command: tuple[str, ...]
    """The script's ``sys.argv``, without what ``change`` adds to it."""
    options: RunOptions
    ghost: GhostSettings
    change: Change

    def can_become(self, other: "ScriptRun") -> bool:
        """Return whether another run would have begun as this one has, and can go on from there."""
        return (
            self.command == other.command
            and _without_the_rest(self.options) == _without_the_rest(other.options)
            and self._shown() == other._shown()
            and self.ghost.device.total.bytes <= other.ghost.device.total.bytes
            and self.options.finish_late <= other.options.finish_late
            and self._can_change_to(other.change)
        )

    def _can_change_to(self, other: Change) -> bool:
        """Return whether what another change adds can be added when the script begins to train."""
        same = replace(other, operations=self.change.operations) == self.change
        added = replace(self.change, plan=other.plan, optimizer=other.optimizer)
        can_be_added = (
            not self.change.strategies
            and other.strategies.keys() <= _LATE_STRATEGIES
            and replace(added, operations=other.operations) == other
        )
        return (same or can_be_added) and other.operations <= self.change.operations

    def _shown(self) -> int:
        """Return the bytes of memory that the script sees."""
        shown = self.ghost.shown_memory
        return self.ghost.device.total.bytes if shown is None else shown


def _without_the_rest(options: RunOptions) -> RunOptions:
    """Return the options that what a script does until it trains depends on."""
    return replace(options, memory=None, finish_late=False, preload=None, objects="", stdout_to_stderr=False)


_MOST = 4
"""Standbys at most: each is a process with what the script holds in memory when it begins to train."""
_SPARE = 3
"""Runs that must fit into memory for another standby: itself, and two side by side."""


@dataclass(slots=True)
class _KeptStandby:
    """The standby that a whole run leaves."""

    run: ScriptRun
    standby: Standby = field(default_factory=Standby)
    users: int = 1
    """Runs that go on: the whole run, then its forks."""
    has_ended: bool = False
    """Whether the whole run has."""

    @property
    def is_ready(self) -> bool:
        """Whether runs can be forked from it."""
        return self.has_ended and self.standby.is_ready()


class ScriptStandbys:
    """The standbys that whole runs of a script leave, for runs that begin alike. Use it as a context manager.

    Threads may make runs side by side.
    """

    def __init__(self) -> None:
        self._kept: list[_KeptStandby] = []
        """Those that were used last come last."""
        self._lock = Lock()

    def declined(self, run: ScriptRun) -> str:
        """Return why a run that this one could have gone on from left no standby; empty if there is none."""
        return next((kept.standby.declined for kept in self._all_for(run)), "")

    @contextmanager
    def whole(self, run: ScriptRun) -> Iterator[StartScript]:
        """Yield what starts a run of the whole script; it leaves a standby unless another run like it did."""
        with self._lock:
            kept = self._add(run)
        if kept is None:
            yield start_script
            return
        try:
            yield kept.standby.start
        finally:
            kept.has_ended = True
            self._release(kept)

    @contextmanager
    def fork(self, run: ScriptRun) -> Iterator[StartScript | None]:
        """Yield what starts a run from a standby; None if there is none for it."""
        with self._lock:
            kept = next((each for each in self._all_for(run) if each.is_ready), None)
            if kept is not None:
                kept.users += 1
                self._kept.remove(kept)
                self._kept.append(kept)
        if kept is None:
            yield None
            return
        try:
            yield kept.standby.fork
        finally:
            self._release(kept)

    def _all_for(self, run: ScriptRun) -> list[_KeptStandby]:
        """Return the standbys from which a run can go on; some may not be ready, or were declined."""
        return [kept for kept in self._kept if kept.run.can_become(run)]

    def _add(self, run: ScriptRun) -> _KeptStandby | None:
        """Add the standby of a run that is to begin; return None if it is to leave none."""
        if run.options.real_ranks or self._all_for(run):  # ranks must fork at the same moment
            return None
        if self._kept and most_in_memory() < _SPARE:
            return None
        unused = [kept for kept in self._kept if kept.users == 0]
        if len(self._kept) >= _MOST:
            if not unused:
                return None
            unused[0].standby.close()
            self._kept.remove(unused[0])
        new = _KeptStandby(run)
        self._kept.append(new)
        return new

    def _release(self, kept: _KeptStandby) -> None:
        with self._lock:
            kept.users -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for kept in self._kept:
            kept.standby.close()
