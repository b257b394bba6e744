"""A kind of step: how it comes to a plan, and what becomes of the plan."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from memfit.arenas import native
from memfit.arenas.step_plan import NO_PLAN, Plan, planned
from memfit.packing.buffers import Column
from memfit.records import DeviceUse, Term
from memfit.units import format_bytes

if TYPE_CHECKING:
    from memfit.report.terminal.arena import PlacedSteps

MOST_DROPS = 3
"""Plans of a kind of step that may fail before it is left alone."""
MANY = 20
"""Steps of a kind that were recorded, and no two the same, after which that is said."""


class Place(Protocol):
    """Whose allocations are placed: ``cpu.Cpu`` or ``cuda.Cuda``."""

    name: str
    """As ``torch.device`` names its type."""
    alignment: int
    """Bytes that places are multiples of."""
    arena: int
    """In C."""

    def reserve(self, size: int) -> bool:
        """Make the arena that large, if it is smaller; say whether it is."""

    def lane(self) -> int:
        """Return whose memory a step's is: see ``c/arena.h``."""

    def settings(self) -> dict[str, str]:
        """Return what decides what a step asks for, beside its batch."""

    def used(self) -> tuple[Term, ...]:
        """Measure what is really used."""

    def device(self) -> DeviceUse:
        """Return whose memory it is."""

    def lend(self) -> None:
        """Give back the arena's memory that nothing lives on; it is to be reserved again."""

    def detach(self) -> None:
        """Leave new allocations alone."""


@dataclass(slots=True)
class Kind:
    """A kind of step, and what is known of it."""

    place: Place
    name: str
    """For messages."""
    plan: Plan | None = None
    handle: int = 0
    """Of the plan, in C."""
    last: Column | None = None
    """How the step was recorded last; None if it was not, or went wrong."""
    drops: int = 0
    recorded: int = 0
    """Steps."""
    placed: int = 0
    """Steps."""
    is_said: bool = False
    """Whether it was told that places were taken, or that no two steps are the same."""
    unplanned: int = 0
    """Allocations of placed steps whose plan did not know them, or not where they could go."""

    def begin(self) -> int:
        """Return what is done with the step that begins now."""
        if self.drops >= MOST_DROPS:
            return native.IDLE
        if self.plan is None:
            return native.RECORDING
        # On a GPU the arena's memory is lent to whatever runs short of its own.
        has_room = native.load().arena_bytes(self.place.arena) >= self.plan.height
        return native.PLACING if has_room or self.place.reserve(self.plan.height) else native.IDLE

    def adopt(self, plan: Plan) -> None:
        """Carry out a plan from now on, if there is memory for its arena."""
        if self.place.reserve(plan.height):
            size, offset = plan.size, plan.offset
            self.handle = native.load().plan_new(len(size), size.ctypes.data, offset.ctypes.data) or 0
        if not self.handle:
            self.drops = MOST_DROPS
            warnings.warn(
                f"memfit.arena: there is no memory for the arena of a {self.name} "
                f"({format_bytes(plan.height)}). Such steps are left to the ordinary allocator.",
                stacklevel=5,
            )
            return
        self.plan, self.last = plan, None

    def learn(self, *, follows: bool) -> bool:
        """Look at a step that was recorded; if it came so twice, plan for it. Return whether there is a plan.

        Args:
            follows: whether the step before, of all kinds, was one of these, and recorded.
        """
        self.recorded += 1
        newer = native.recorded(self.place.arena, before=False)
        older = native.recorded(self.place.arena, before=True) if follows else self.last
        self.last = newer
        if older is not None and len(newer) and older[:, 0].tolist() == newer[:, 0].tolist():
            self.adopt(planned(older, newer, follows=follows, alignment=self.place.alignment))
        else:
            self._tell_of_no_two()
        return self.plan is not None

    def learn_once(self) -> None:
        """Plan for a step that comes once in a process, for the next process."""
        self.recorded += 1
        once = native.recorded(self.place.arena, before=False)
        self.plan = planned(once, once, follows=False, alignment=self.place.alignment)

    def judge(self) -> bool:
        """Look at a step that was placed; drop its plan if it was another one. Return whether."""
        tally = native.tally(self.place.arena)
        self.placed += 1
        self.unplanned += tally["unplanned"]
        if not (tally["differing"] or tally["skipped"]):
            self._tell_of_overlaps(tally["overlapping"])
            return False
        self.drop()
        warnings.warn(self._difference(tally), stacklevel=4)
        return True

    def _tell_of_overlaps(self, count: int) -> None:
        if count and not self.is_said:
            self.is_said = True
            warnings.warn(
                f"memfit.arena: in a {self.name} {count:,} allocations were the ordinary allocator's: what "
                "was held longer than in the steps of the plan still lives in their places. (Gradients, "
                "where zero_grad comes after an evaluation?) This is said once; the report counts them.",
                stacklevel=5,
            )

    def _tell_of_no_two(self) -> None:
        if self.recorded == MANY and not self.is_said:
            self.is_said = True
            warnings.warn(
                f"memfit.arena: {MANY} times a {self.name} was recorded, and no two were the same. Give "
                "steps that differ something to be told apart by: train('generator', batch), or tensors "
                "whose shapes say how large the step is.",
                stacklevel=5,
            )

    def summary(self) -> "PlacedSteps":
        """Return what came of its steps."""
        from memfit.report.terminal.arena import PlacedSteps

        plan = self.plan or NO_PLAN
        kept = int((plan.offset < 0).sum())
        return PlacedSteps(
            self.name,
            self.recorded,
            self.placed,
            len(plan.size),
            kept,
            self.unplanned,
            plan.unshared,
            plan.bound,
            plan.height,
        )

    def drop(self) -> None:
        """Have no plan any more."""
        self.release()
        self.plan = None
        self.drops += 1
        self.place.lend()

    def release(self) -> None:
        """Give back what the plan takes in C; it cannot be carried out any more."""
        native.load().arena_end(self.place.arena)  # where a step was interrupted before its end
        handle, self.handle = self.handle, 0
        native.load().plan_free(handle or None)

    def _difference(self, tally: dict[str, int]) -> str:
        if tally["differing"]:
            asked = format_bytes(tally["first_bytes"])
            what = f"{asked} was asked for where the plan has allocation {tally['first']:,}"
        else:
            what = f"{tally['skipped']:,} of its allocations did not come"
        then = (
            "The next ones are recorded anew."
            if self.drops < MOST_DROPS
            else f"It was plan number {MOST_DROPS}: they are left to the ordinary allocator from now on."
        )
        return (
            f"memfit.arena: a {self.name} was not as planned: {what}. {tally['unplanned']:,} allocations "
            f"({format_bytes(tally['unplanned_bytes'])}) were the ordinary allocator's instead. {then}"
        )
