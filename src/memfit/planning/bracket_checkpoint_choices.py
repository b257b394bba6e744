"""Choices between the fastest that fits and the smallest that does not, under what runs have shown.

peak predicted   ── over: ran, did not fit
next: what the budget admits, or halfway between the two
── best: ran, fits
"""

from math import isfinite

from memfit.planning.batch_size_changes import process_bytes_independent_of_batch
from memfit.planning.choose_checkpointing import CheckpointChoice, CheckpointChooser
from memfit.planning.mixed_integer_solver import INFINITY
from memfit.planning.run_changes_on_ghost import PlanRuns
from memfit.records import PlanRun

WORTH = 0.005
"""Share of a step's time that another plan must be expected to save to be looked for."""
_PREDICTED_WITHIN = 0.15
"""Share of what depends on the batch by which a prediction may be too high: with ResNet-50, up to 0.1."""


class CheckpointChoiceBracket:
    """Narrows choices for one batch size down.

    Args:
        chooser: of the step.
        runs: of the search, which say what fits.
        plain: a run under no choice.
        step: seconds of the step as written.
    """

    def __init__(self, chooser: CheckpointChooser, runs: PlanRuns, plain: PlanRun, step: float) -> None:
        self._chooser, self._runs = chooser, runs
        self._fixed = process_bytes_independent_of_batch(plain)
        self._plain = plain
        self._besides = plain.needs.bytes - chooser.plain_peak
        """What the last run needed over its prediction."""
        self._longer = plain.change.parts / step if step else 0.0
        """By how much each second that is predicted makes a step longer, relative to one as written: as in
        the last run."""
        self._ran: list[tuple[CheckpointChoice, PlanRun]] = []
        self._ran_for: int | None = None
        """The budget for which the last was chosen."""
        self._next: CheckpointChoice | None = None
        self._found_for: int | None = None
        """The budget for which the next choice is known."""
        self._bound = 0.0
        """No choice that is predicted to fit adds fewer seconds; infinite if none is."""

    @property
    def best(self) -> tuple[CheckpointChoice, PlanRun] | None:
        """The fastest that fits."""
        fitting = [each for each in self._ran if self._runs.fits(each[1])]
        return min(fitting, key=lambda each: each[1].time, default=None)

    @property
    def _over(self) -> tuple[CheckpointChoice, PlanRun] | None:
        """The choice with the smallest predicted peak of those that did not fit."""
        over = [each for each in self._ran if not self._runs.fits(each[1])]
        return min(over, key=lambda each: each[0].peak, default=None)

    @property
    def has_run(self) -> bool:
        """Whether any choice has run."""
        return bool(self._ran)

    def next(self) -> CheckpointChoice | None:
        """Return the choice to run next; None if none may fit, or none that may is worth it."""
        if self._found_for != self._runs.budget:
            self._next, self._found_for = self._find(), self._runs.budget
        return self._next

    def time(self, choice: CheckpointChoice) -> float:
        """Return the time of a step that is predicted for a choice, relative to the script as written."""
        return self._longer_by(choice.seconds)

    @property
    def bound(self) -> float:
        """The time of a step below which no choice is that is predicted to fit; infinite if none is."""
        return self._longer_by(self._bound)

    @property
    def least(self) -> float:
        """The time below which no choice is that may yet fit."""
        if self._over is not None:
            return self._longer_by(self._over[0].bound)
        is_known = self.best is not None and self._ran_for == self._runs.budget
        return self._longer_by(self.best[0].bound if self.best is not None and is_known else 0.0)

    def _longer_by(self, seconds: float) -> float:
        return self._plain.time + (seconds * self._longer if seconds else 0.0)

    @property
    def smallest(self) -> CheckpointChoice:
        """The choice that is predicted to need least."""
        return self._chooser.smallest

    @property
    def least_needs(self) -> int:
        """Bytes of the process that it is predicted to need."""
        return self.needs(self._chooser.least)

    def needs(self, choice: CheckpointChoice) -> int:
        """Return the bytes of the process that a choice is predicted to need."""
        return choice.peak + self._besides

    def may_fit(self, choice: CheckpointChoice) -> bool:
        """Return whether a choice is predicted to fit, or no run has shown how far predictions are off."""
        return not self._ran or self.needs(choice) <= self._runs.budget

    def add(self, choice: CheckpointChoice, run: PlanRun) -> None:
        """Add a run under a choice."""
        self._found_for, self._ran_for = None, self._runs.budget
        self._besides = run.needs.bytes - choice.peak
        if choice.seconds and isfinite(run.time):
            self._longer = max(0.0, run.time - self._plain.time) / choice.seconds
        self._ran.append((choice, run))
        if self.best is not None and self.best[0] is choice:
            self._bound = choice.bound

    def _find(self) -> CheckpointChoice | None:
        budget, best = self._runs.budget, self.best
        over = self._over[0] if self._over is not None else None
        if best is not None and self._saving_to_expect(best[1]) <= WORTH:
            return None
        target = budget - self._besides
        if over is not None and target >= over.peak:
            fits = best[0].peak if best is not None else over.peak - budget // 50
            target = (fits + over.peak) // 2
        found = self._chooser.choose(target)
        if best is None:
            self._bound = found.bound if found is not None else INFINITY
        if found is None:
            within = _PREDICTED_WITHIN * max(0, self.least_needs - self._fixed)
            if self.least_needs - within > budget:
                return None
        choice = found or self._chooser.smallest
        return None if not choice.regions or self._has_run(choice) else choice

    def _saving_to_expect(self, best: PlanRun) -> float:
        """Return by how much less time a choice may take that needs the whole budget.

        Between the fastest that fits and what did not, time falls as needs grow.
        """
        if self._over is None:
            return best.time - self._plain.time
        choice, run = self._over
        saving, more = best.time - self._longer_by(choice.seconds), run.needs.bytes - best.needs.bytes
        return saving * min(1.0, (self._runs.budget - best.needs.bytes) / more) if more > 0 else saving

    def _has_run(self, choice: CheckpointChoice) -> bool:
        """Return whether a choice has run, or one alike: of identical modules, any may be recomputed."""
        return any((each.peak, each.seconds) == (choice.peak, choice.seconds) for each, _ in self._ran)
