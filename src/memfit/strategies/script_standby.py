"""Which runs of a script can go on from the standby of an earlier run, without starting the script again."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from types import TracebackType
from typing import Self

from memfit.analysis.script_change import ScriptChange
from memfit.run.child_settings import GhostSettings
from memfit.run.forked_runs import Standby
from memfit.run.options import RunOptions
from memfit.run.start_script import StartScript, start_script

_LATE_STRATEGIES = ("checkpointing", "compilation", "offload", "optimizer_state")
"""Strategies that change nothing before a model is called."""


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """A run of a script, as far as its beginning may depend on it."""

    command: tuple[str, ...]
    """The script's ``sys.argv``, without what ``change`` adds to it."""
    options: RunOptions
    ghost: GhostSettings
    change: ScriptChange

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

    def _can_change_to(self, other: ScriptChange) -> bool:
        """Return whether what another change adds can be added when the script begins to train."""
        same = replace(other, operations=self.change.operations) == self.change
        added = replace(self.change, strategies=other.strategies, optimizer=other.optimizer)
        can_be_added = (
            not self.change.strategies
            and all(each.field in _LATE_STRATEGIES for each in other.strategies)
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


class ScriptStandby:
    """The standby of the first run of a script that is started with it. Use it as a context manager."""

    def __init__(self) -> None:
        self._standby = Standby()
        self._first: ScriptRun | None = None
        self._in_use = Lock()

    @property
    def declined(self) -> str:
        """Why the first run could not leave a standby; empty if it has, or never came to fork one."""
        return self._standby.declined

    def whole(self, run: ScriptRun) -> StartScript:
        """Return what starts a run of the whole script; the first leaves the standby."""
        if self._first is not None or run.options.real_ranks:  # ranks must fork at the same moment
            return start_script
        self._first = run
        return self._standby.start

    @contextmanager
    def fork(self, run: ScriptRun) -> Iterator[StartScript | None]:
        """Yield what starts a run from the standby; None if it cannot go on from there, or another does."""
        can_go_on = self._first is not None and self._first.can_become(run)
        if not can_go_on or not self._in_use.acquire(blocking=False):
            yield None
            return
        try:
            yield self._standby.fork if self._standby.is_ready() else None
        finally:
            self._in_use.release()

    def __enter__(self) -> Self:
        self._standby.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._standby.__exit__(kind, error, trace)
