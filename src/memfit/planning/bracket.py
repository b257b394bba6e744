"""Choices between the fastest that fits and the smallest that does not, under what runs have shown.

peak predicted   ── over: ran, did not fit
next: what the budget admits, or halfway between the two
── best: ran, fits
"""

from memfit.planning.batch_size_search import least_with_smaller_batches
from memfit.planning.choose import CheckpointChoice, CheckpointChooser
from memfit.planning.mixed_integer_program import INFINITY
from memfit.records import PlanRun

WORTH = 0.003
"""Share of a step's time that another plan must be able to save to be looked for."""
_PREDICTED_WITHIN = 0.15
"""Share of what depends on the batch by which a prediction may be too high: with ResNet-50, up to 0.1."""


class Bracket:
    """Narrows choices for one batch size down.

    Args:
        chooser: of the step.
        budget: bytes of the process.
        plain: a run under no choice.
        step: seconds of the step as written.
    """

    def __init__(self, chooser: CheckpointChooser, budget: int, plain: PlanRun, step: float) -> None:
        self._chooser, self._budget, self._step = chooser, budget, step
        self._fixed = least_with_smaller_batches(plain)
        self._besides = plain.needs.bytes - chooser.plain_peak
        """What the last run needed over its prediction."""
        self._over: CheckpointChoice | None = None
        """The choice with the smallest predicted peak of those that did not fit."""
        self._seen: set[tuple[int, float]] = set()
        """By prediction: of identical modules, it does not matter which are recomputed."""
        self._next: CheckpointChoice | None = None
        self._is_known = False
        self.bound = 0.0
        """No choice that is predicted to fit adds fewer seconds; infinite if none is."""
        self.best: tuple[CheckpointChoice, PlanRun] | None = None
        """The fastest that fits."""

    def next(self) -> CheckpointChoice | None:
        """Return the choice to run next; None if none may fit, or none that may is worth it."""
        if not self._is_known:
            self._next, self._is_known = self._find(), True
        return self._next

    @property
    def least(self) -> float:
        """Seconds that every choice adds which may yet fit."""
        if self._over is not None:
            return self._over.bound
        return self.best[0].bound if self.best is not None else 0.0

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

    def add(self, choice: CheckpointChoice, run: PlanRun) -> None:
        """Add a run under a choice."""
        self._is_known = False
        self._seen.add((choice.peak, choice.seconds))
        self._besides = run.needs.bytes - choice.peak
        if run.needs.bytes > self._budget:
            if self._over is None or choice.peak < self._over.peak:
                self._over = choice
        elif self.best is None or choice.seconds < self.best[0].seconds:
            self.best = choice, run
            self.bound = choice.bound

    def _find(self) -> CheckpointChoice | None:
        fastest = self._over.seconds if self._over is not None else 0.0
        if self.best is not None and self.best[0].seconds - fastest <= WORTH * self._step:
            return None
        target = self._budget - self._besides
        if self._over is not None and target >= self._over.peak:
            fits = self.best[0].peak if self.best is not None else self._over.peak - self._budget // 50
            target = (fits + self._over.peak) // 2
        found = self._chooser.choose(target)
        if self.best is None:
            self.bound = found.bound if found is not None else INFINITY
        if found is None:
            within = _PREDICTED_WITHIN * max(0, self.least_needs - self._fixed)
            if self.least_needs - within > self._budget:
                return None
        choice = found or self._chooser.smallest
        if not choice.regions or (choice.peak, choice.seconds) in self._seen:
            return None
        return choice
