"""A kind of step: recorded until it repeats, then planned and placed, until its plan no longer matches."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memfit.arenas import arena_library
from memfit.arenas.arena_memory import ArenaMemory
from memfit.arenas.step_plan import NO_PLAN, StepPlan, plan_step_offsets
from memfit.packing.buffer_lifetimes import Column
from memfit.units import format_bytes
from memfit.user_lines import warn_user

if TYPE_CHECKING:
    from memfit.report.terminal.arena_report import StepKindReport

MOST_DROPS = 3
"""Number of plans that may fail before a kind of step is left to the default allocator."""
MANY = 20
"""Number of recorded steps of a kind, no two of them the same, after which memfit warns."""


@dataclass(slots=True)
class RepeatedStep:
    """A kind of step: its last recording, its plan, and its counts."""

    memory: ArenaMemory
    name: str
    """Name in messages."""
    plan: StepPlan | None = None
    handle: int = 0
    """Pointer to the plan in C; 0 without one."""
    last: Column | None = None
    """The last recording; None if there is none, or if it failed."""
    drops: int = 0
    recorded: int = 0
    """Number of steps recorded."""
    placed: int = 0
    """Number of steps placed."""
    has_warned: bool = False
    """Whether memfit has warned of occupied slots, or that no two steps are the same."""
    unplanned: int = 0
    """Allocations of placed steps that had no slot in the plan, or whose slot was occupied."""

    def begin(self) -> int:
        """Return the mode of the step that begins now: idle, recording or placing."""
        if self.drops >= MOST_DROPS:
            return arena_library.IDLE
        if self.plan is None:
            return arena_library.RECORDING
        # On a GPU, other allocations may have taken the arena's memory when their own ran out.
        has_room = arena_library.load().arena_bytes(self.memory.arena) >= self.plan.height
        return (
            arena_library.PLACING if has_room or self.memory.reserve(self.plan.height) else arena_library.IDLE
        )

    def use_plan(self, plan: StepPlan) -> None:
        """Place later steps by a plan, if there is memory for its arena."""
        if self.memory.reserve(plan.height):
            size, offset = plan.size, plan.offset
            self.handle = arena_library.load().plan_new(len(size), size.ctypes.data, offset.ctypes.data) or 0
        if not self.handle:
            self.drops = MOST_DROPS
            warn_user(
                f"memfit.arena: there is not enough memory for the arena of a {self.name}, which takes "
                f"{format_bytes(plan.height)}. Steps of this kind use the default allocator.",
            )
            return
        self.plan, self.last = plan, None

    def learn(self, *, follows: bool) -> bool:
        """Plan a recorded step if it repeats the recording before. Return whether there is a plan.

        Args:
            follows: whether the step right before was of this kind, too, and was recorded.
        """
        self.recorded += 1
        newer = arena_library.recorded_allocations(self.memory.arena, before=False)
        older = arena_library.recorded_allocations(self.memory.arena, before=True) if follows else self.last
        self.last = newer
        if older is not None and len(newer) and older[:, 0].tolist() == newer[:, 0].tolist():
            self.use_plan(plan_step_offsets(older, newer, follows=follows, alignment=self.memory.alignment))
        else:
            self._warn_of_no_repeat()
        return self.plan is not None

    def learn_once(self) -> None:
        """Plan a step that occurs once per process, for the next process."""
        self.recorded += 1
        once = arena_library.recorded_allocations(self.memory.arena, before=False)
        self.plan = plan_step_offsets(once, once, follows=False, alignment=self.memory.alignment)

    def check_placed(self) -> bool:
        """Compare a placed step with its plan; drop the plan if they differ, and return whether they do."""
        tally = arena_library.step_tally(self.memory.arena)
        self.placed += 1
        self.unplanned += tally["unplanned"]
        if not (tally["differing"] or tally["skipped"]):
            self._warn_of_overlaps(tally["overlapping"])
            return False
        self.drop_plan()
        warn_user(self._difference(tally))
        return True

    def _warn_of_overlaps(self, count: int) -> None:
        if count and not self.has_warned:
            self.has_warned = True
            warn_user(
                f"memfit.arena: in a {self.name}, {count:,} allocation{'s' * (count != 1)} fell back to the "
                "default allocator. Earlier tensors still occupied the planned places. The script kept "
                "those tensors longer than in the recorded steps. For example, gradients stay alive during "
                "an evaluation if the script calls zero_grad only after it. memfit warns only once; the "
                "arena's report counts all such allocations.",
            )

    def _warn_of_no_repeat(self) -> None:
        if self.recorded == MANY and not self.has_warned:
            self.has_warned = True
            warn_user(
                f"memfit.arena: memfit cannot plan the steps of the kind '{self.name}'. It recorded {MANY} "
                "of them, and no two in a row were the same. If the script has several kinds of steps, name "
                "each kind: train('generator', batch). If the sizes of the steps vary, pass train() the "
                "tensors whose shapes determine these sizes.",
            )

    def summary(self) -> "StepKindReport":
        """Return the counts for the arena's report."""
        from memfit.report.terminal.arena_report import StepKindReport

        plan = self.plan or NO_PLAN
        kept = int((plan.offset < 0).sum())
        return StepKindReport(
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

    def drop_plan(self) -> None:
        """Discard the plan."""
        self.free_plan()
        self.plan = None
        self.drops += 1
        self.memory.release_unused()

    def free_plan(self) -> None:
        """Free the plan in C."""
        arena_library.load().arena_end(self.memory.arena)  # in case a step was interrupted
        handle, self.handle = self.handle, 0
        arena_library.load().plan_free(handle or None)

    def _difference(self, tally: dict[str, int]) -> str:
        if tally["differing"]:
            requested = format_bytes(tally["first_bytes"])
            what = f"its allocation number {tally['first']:,}, of {requested}, is not in the plan"
        else:
            what = f"it skipped {tally['skipped']:,} planned allocation{'s' * (tally['skipped'] != 1)}"
        then = (
            "memfit now records the next steps of this kind, to make a new plan."
            if self.drops < MOST_DROPS
            else f"After {MOST_DROPS} plans, later steps of this kind use the default allocator."
        )
        return (
            f"memfit.arena: a {self.name} did not match its plan ({what}). {tally['unplanned']:,} "
            f"allocation{'s' * (tally['unplanned'] != 1)} ({format_bytes(tally['unplanned_bytes'])}) fell "
            f"back to the default allocator. {then}"
        )
