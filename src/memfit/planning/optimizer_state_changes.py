"""What a plan can change about an optimizer, so that the script holds less of gradients and of its state.

                    gradients      state             time
step in backward    the largest    all               none
8-bit state         all            a quarter         none: other numerics
state offloaded     all            on its way        to the host and back for each update
"""

from collections.abc import Callable, Sequence

from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.planning.bracket_checkpoint_choices import WORTH
from memfit.planning.strategy_and_allocator_changes import AllowedChanges
from memfit.records import Category, Change, Phase, PlanRun

_Settings = dict[str, bool | int | str]
IN_8_BITS = 8 / 32
"""What is left of the state in 8 bits."""
_RELEVANT = 0.05
"""Share of what a run needs that a change must be able to save to be tried."""


_IN_BACKWARD: _Settings = {"step_in_backward": True}
_IN_8_BITS: _Settings = {"bits": 8, "backend": "bitsandbytes"}
"""Not torchao: ``torch.compile`` compiles its steps, which takes half a minute."""
_OFFLOADED: _Settings = {"offload": True}


def optimizer_state_changes(allowed: AllowedChanges) -> tuple[Change, ...]:
    """Return the changes that a plan may make: the fastest first, and of these the most exact ones.

    >>> [
    ...     change.words
    ...     for change in optimizer_state_changes(AllowedChanges(optimizer=False, low_bit_state=True))
    ... ]
    [('8-bit optimizer state',)]
    """
    exact, low = allowed.optimizer, allowed.low_bit_state
    changes = (
        (exact, "step in backward", _IN_BACKWARD),
        (low, "8-bit optimizer state", _IN_8_BITS),
        (exact and low, "8-bit optimizer state, step in backward", _IN_8_BITS | _IN_BACKWARD),
        (exact, "optimizer state offloaded", _OFFLOADED),
        (exact, "optimizer state offloaded, step in backward", _OFFLOADED | _IN_BACKWARD),
    )
    return tuple(
        Change({"optimizer_state": settings}, words=(words,)) for may, words, settings in changes if may
    )


def least_time_with_state_offloaded(step: float, busy: float, copies: float) -> float:
    """Return the time that no step takes less of with its state offloaded, relative to one as written.

    Copies wait for the GPU's work, and not for the host's.

    Args:
        step: seconds of a step as written.
        busy: seconds of that in which the GPU works.
        copies: seconds of copying the state to the host and back.

    >>> least_time_with_state_offloaded(4.0, 4.0, 1.0), least_time_with_state_offloaded(4.0, 2.0, 1.0)
    (1.25, 1.0)
    """
    return max(1.0, (busy + copies) / step)


class OptimizerChangesToTry:
    """The changes that are worth a run, one after the other.

    Args:
        plain: the run without any change.
        allowed: what a plan may change.
        budget: bytes of the process.
        offloaded: returns the time that no step with its state offloaded takes less of, relative to a step
            as written.
    """

    def __init__(
        self, plain: PlanRun, allowed: AllowedChanges, budget: int, offloaded: Callable[[], float]
    ) -> None:
        self._plain, self._budget, self._offloaded = plain, budget, offloaded
        self._changes = optimizer_state_changes(allowed)
        self._left = list(self._changes)
        self._too_little: list[Change] = []
        """What seemed not to be enough."""
        self._made: list[Change] = []
        """What was returned, and not refused."""

    def next(self, tried: Sequence[PlanRun], chosen: PlanRun | None) -> Change | None:
        """Return the next change that may make something fit, or fit in less time; None if none is left.

        If nothing fits, the last is the one that saves most, even where it seems too little: what a change
        saves is an estimate, and the script's smallest peak is one that ran.

        Args:
            tried: what has run.
            chosen: the fastest of these that fits.
        """
        while self._left:
            change = self._left.pop(0)
            runs = [
                run
                for run in tried
                if run.change.micro_batches is None or not makes_updates_in_backward(change)
            ]
            if chosen is not None:
                if self._may_be_faster(change, runs, chosen):
                    return self._make(change)
                continue
            smallest = min([*runs, self._plain], key=lambda run: run.needs.bytes)
            if smallest.needs.bytes - _saves(change, smallest) <= self._budget:
                return self._make(change)
            if _saves(change, smallest) or _saves(change, self._plain):
                self._too_little.append(change)
        if chosen is None and self._too_little:
            change = self._too_little.pop()
            if all(self._changes.index(made) < self._changes.index(change) for made in self._made):
                return self._make(change)
        return None

    def _make(self, change: Change) -> Change:
        self._made.append(change)
        return change

    def refuse(self, change: Change) -> None:
        """Leave out what contains a change that the script cannot make."""
        self._made.remove(change)
        for some in (self._left, self._too_little):
            some[:] = (each for each in some if not has_all_optimizer_settings_of(each, change))

    def _may_be_faster(self, change: Change, runs: Sequence[PlanRun], chosen: PlanRun) -> bool:
        time = self._offloaded() if offloads_state(change) else 1.0
        if time >= chosen.time - WORTH:
            return False
        alone = 0 < _saves(change, self._plain) >= self._plain.needs.bytes - self._budget
        return alone or (chosen in runs and _saves(change, chosen) > 0)


def has_all_optimizer_settings_of(change: Change, other: Change) -> bool:
    """Return whether a change of the optimizer has all settings of another."""
    return _settings(other).items() <= _settings(change).items()


def _saves(change: Change, run: PlanRun) -> int:
    """Return the bytes that a change is estimated to save at the peak of a run; 0 if that is irrelevant.

    The allocator's cache shrinks with them, by more or by less.
    """
    saved = bytes_of_category_at_peak(run, Category.GRADIENT) if makes_updates_in_backward(change) else 0
    saved += optimizer_state_bytes_saved(change, run)
    if run.place.phase is Phase.OPTIMIZER:  # it updates a few parameters at a time
        saved += bytes_of_category_at_peak(run, Category.TEMPORARY)
    return saved if saved >= _RELEVANT * run.needs.bytes else 0


def bytes_of_category_at_peak(run: PlanRun, category: Category) -> int:
    """Return the bytes of a category at the peak of a run."""
    return sum(term.figure.bytes for term in run.terms if term.name == CATEGORY_NAMES[category])


def makes_updates_in_backward(change: Change) -> bool:
    """Return whether each backward makes an update under a change: then batches cannot be divided."""
    return "step_in_backward" in _settings(change)


def optimizer_state_bytes_saved(change: Change, run: PlanRun) -> int:
    """Return the bytes of the optimizer's state at the peak of a run that a change saves."""
    state = bytes_of_category_at_peak(run, Category.OPTIMIZER_STATE)
    if offloads_state(change):
        return state
    return round((1 - IN_8_BITS) * state) if has_8_bit_state(change) else 0


def has_8_bit_state(change: Change) -> bool:
    """Return whether the optimizer's state has 8 bits under a change."""
    return "bits" in _settings(change)


def offloads_state(change: Change) -> bool:
    """Return whether the optimizer's state waits on the host under a change."""
    return "offload" in _settings(change)


def _settings(change: Change) -> _Settings:
    """Return a change's settings of ``memfit.OptimizerState``."""
    settings: _Settings = change.plan.get("optimizer_state", {})
    return settings
