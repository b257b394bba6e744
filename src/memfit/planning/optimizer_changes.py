"""What a plan can change about an optimizer, so that the script holds less of gradients and of its state.

                    gradients      state             time
step in backward    the largest    all               none
8-bit state         all            a quarter         none: other numerics
state offloaded     all            on its way        to the host and back for each update
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from memfit.analysis.breakdown import CATEGORY_NAMES
from memfit.analysis.script_change import PlannedStrategy, ScriptChange
from memfit.planning.allowed import Allowed
from memfit.planning.bracket import WORTH
from memfit.planning.changes import PlanChange
from memfit.records import Category, Phase, PlanRun

_Settings = dict[str, bool | int | str]
IN_8_BITS = 8 / 32
"""What is left of the state in 8 bits."""
_RELEVANT = 0.05
"""Share of what a run needs that a change must be able to save to be tried."""


@dataclass(frozen=True, slots=True)
class OptimizerChange:
    """A change of the optimizer."""

    words: str
    settings: _Settings
    """Of ``memfit.OptimizerState``."""

    @property
    def steps_in_backward(self) -> bool:
        """Whether each backward makes an update: then batches cannot be divided."""
        return "step_in_backward" in self.settings

    @property
    def offloads(self) -> bool:
        """Whether the state waits on the host."""
        return "offload" in self.settings

    def plan(self, optimizer: int | None) -> PlanChange:
        """Return the change of the script.

        Args:
            optimizer: which optimizer of the script, counted from 0; None for all.
        """
        strategy = PlannedStrategy("optimizer_state", tuple(self.settings.items()))
        return PlanChange(
            ScriptChange((strategy,), optimizer),
            {"optimizer_state": self.settings},
            late=self.offloads,
            words=(self.words,),
        )

    def saves(self, run: PlanRun) -> int:
        """Return the bytes that it is estimated to save at the peak of a run; 0 if that is irrelevant.

        The allocator's cache shrinks with them, by more or by less.
        """
        saved = held(run, Category.GRADIENT) if self.steps_in_backward else 0
        saved += saved_of_state(self.plan(None), run)
        if run.place.phase is Phase.OPTIMIZER:  # it updates a few parameters at a time
            saved += held(run, Category.TEMPORARY)
        return saved if saved >= _RELEVANT * run.needs.bytes else 0


_IN_BACKWARD: _Settings = {"step_in_backward": True}
_IN_8_BITS: _Settings = {"bits": 8, "backend": "bitsandbytes"}
"""Not torchao: ``torch.compile`` compiles its steps, which takes half a minute."""
_OFFLOADED: _Settings = {"offload": True}


def optimizer_changes(allowed: Allowed) -> tuple[OptimizerChange, ...]:
    """Return the changes that a plan may make: the fastest first, and of these the most exact ones.

    >>> [change.words for change in optimizer_changes(Allowed(optimizer=False, low_bit_state=True))]
    ['8-bit optimizer state']
    """
    exact, low = allowed.optimizer, allowed.low_bit_state
    changes = (
        (exact, "step in backward", _IN_BACKWARD),
        (low, "8-bit optimizer state", _IN_8_BITS),
        (exact and low, "8-bit optimizer state, step in backward", _IN_8_BITS | _IN_BACKWARD),
        (exact, "optimizer state offloaded", _OFFLOADED),
        (exact, "optimizer state offloaded, step in backward", _OFFLOADED | _IN_BACKWARD),
    )
    return tuple(OptimizerChange(words, settings) for may, words, settings in changes if may)


class OptimizerChanges:
    """The changes that are worth a run, one after the other.

    Args:
        plain: the run without any change.
        allowed: what a plan may change.
        budget: bytes of the process.
        copies: returns the time for which a step copies the state, if that is offloaded.
    """

    def __init__(self, plain: PlanRun, allowed: Allowed, budget: int, copies: Callable[[], float]) -> None:
        self._plain, self._budget, self._copies = plain, budget, copies
        self._changes = optimizer_changes(allowed)
        self._left = list(self._changes)
        self._too_little: list[OptimizerChange] = []
        """What seemed not to be enough."""
        self._made: list[OptimizerChange] = []
        """What was returned, and not refused."""

    def next(self, tried: Sequence[PlanRun], chosen: PlanRun | None) -> OptimizerChange | None:
        """Return the next change that may make something fit, or fit in less time; None if none is left.

        If nothing fits, the last is the one that saves most, even where it seems too little: what a change
        saves is an estimate, and the script's smallest peak is one that ran.

        Args:
            tried: what has run.
            chosen: the fastest of these that fits.
        """
        while self._left:
            change = self._left.pop(0)
            runs = [run for run in tried if run.divided is None or not change.steps_in_backward]
            if chosen is not None:
                if self._may_be_faster(change, runs, chosen):
                    return self._make(change)
                continue
            smallest = min([*runs, self._plain], key=lambda run: run.needs.bytes)
            if smallest.needs.bytes - change.saves(smallest) <= self._budget:
                return self._make(change)
            if change.saves(smallest) or change.saves(self._plain):
                self._too_little.append(change)
        if chosen is None and self._too_little:
            change = self._too_little.pop()
            if all(self._changes.index(made) < self._changes.index(change) for made in self._made):
                return self._make(change)
        return None

    def _make(self, change: OptimizerChange) -> OptimizerChange:
        self._made.append(change)
        return change

    def refuse(self, change: OptimizerChange) -> None:
        """Leave out what contains a change that the script cannot make."""
        self._made.remove(change)
        for some in (self._left, self._too_little):
            some[:] = (each for each in some if not change.settings.items() <= each.settings.items())

    def _may_be_faster(self, change: OptimizerChange, runs: Sequence[PlanRun], chosen: PlanRun) -> bool:
        time = 1.0 + (self._copies() if change.offloads else 0.0)
        if time >= chosen.time - WORTH:
            return False
        alone = 0 < change.saves(self._plain) >= self._plain.needs.bytes - self._budget
        return alone or (chosen in runs and change.saves(chosen) > 0)


def held(run: PlanRun, category: Category) -> int:
    """Return the bytes of a category at the peak of a run."""
    return sum(term.figure.bytes for term in run.terms if term.name == CATEGORY_NAMES[category])


def steps_in_backward(plan: PlanChange) -> bool:
    """Return whether each backward makes an update under a plan: then batches cannot be divided."""
    return "step_in_backward" in plan.settings.get("optimizer_state", {})


def saved_of_state(plan: PlanChange, run: PlanRun) -> int:
    """Return the bytes of the optimizer's state at the peak of a run that a plan saves."""
    state = held(run, Category.OPTIMIZER_STATE)
    if offloads_state(plan):
        return state
    return round((1 - IN_8_BITS) * state) if has_8_bit_state(plan) else 0


def has_8_bit_state(plan: PlanChange) -> bool:
    """Return whether the optimizer's state has 8 bits under a plan."""
    return "bits" in plan.settings.get("optimizer_state", {})


def offloads_state(plan: PlanChange) -> bool:
    """Return whether the optimizer's state waits on the host under a plan."""
    return "offload" in plan.settings.get("optimizer_state", {})
