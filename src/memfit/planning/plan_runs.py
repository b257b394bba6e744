"""Run changes to a script on the ghost: what it then needs, and what holds the memory at its peak."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from memfit.analysis.needed_memory import ReplayedRun, process_bytes
from memfit.analysis.script_change import RunTrial, ScriptChange, TrialResult
from memfit.analysis.summary import summarize
from memfit.planning.changes import PlanChange, expandable_segments
from memfit.records import Operation, PlanRun, ScriptEnd


@dataclass(frozen=True, slots=True)
class GhostRuns:
    """Two ways to run a script under a change; with unlimited memory, unless it says otherwise."""

    run: RunTrial
    """With GPU work that is done at once."""
    run_late: RunTrial
    """With GPU work on side streams that finishes as late as its order allows."""

    def finishing(self, *, late: bool) -> RunTrial:
        """Return one of the two."""
        return self.run_late if late else self.run


@dataclass(frozen=True, slots=True)
class PlannedScript(GhostRuns):
    """A script to be planned for, and what is known about the card."""

    seconds: Callable[[Operation], float]
    """How long an operation takes."""
    copy: Callable[[int], float]
    """How long it takes to copy bytes to the host and back."""
    rule: str
    """What the times are based on."""


class PlanRuns:
    """The runs of a search, in order.

    Args:
        script: the script.
        budget: bytes of the process.
        tune: whether runs that do not fit may get expandable segments.
        compiled: whether ``torch.compile`` compiles the script's code.
        gpu: bytes of a GPU: a run that fits it needs what PyTorch takes there, its cache included; 0 if they
            are unknown. By default every run needs the smallest GPU on which it fits.
    """

    def __init__(
        self,
        script: GhostRuns,
        budget: int,
        *,
        tune: bool,
        compiled: bool = False,
        gpu: int | None = None,
    ) -> None:
        self._script, self._budget, self._tune, self._compiled = script, budget, tune, compiled
        self._gpu = gpu
        self.count = 0
        """How many runs were begun."""
        self.tried: list[PlanRun] = []

    def fits(self, run: PlanRun) -> bool:
        """Return whether a run fits the budget."""
        return run.needs.bytes <= self._budget

    def run(
        self, plan: PlanChange, *, operations: bool = False
    ) -> tuple[TrialResult, ReplayedRun] | ScriptEnd:
        """Run a plan, but for settings of the allocator, which a replay applies.

        Args:
            plan: the plan.
            operations: whether the operations of a step are recorded.
        """
        self.count += 1
        change = replace(plan.change, conf="") | ScriptChange(operations=operations)
        what = f"{', '.join(plan.words)} (plan {self.count})"
        result = self._script.finishing(late=plan.late)(change, what)
        return result if isinstance(result, ScriptEnd) else (result, replayed(result))

    def make(
        self, plan: PlanChange, time: float | Callable[[TrialResult], float], *, operations: bool = False
    ) -> tuple[TrialResult, PlanRun] | ScriptEnd:
        """Run a plan, and add what it needs to ``tried``.

        Args:
            plan: the plan.
            time: of a step, relative to the script as written, or what computes it from the result.
            operations: whether the operations of a step are recorded.
        """
        made = self.run(plan, operations=operations)
        if isinstance(made, ScriptEnd):
            return made
        result, run = made
        done = self.needs(run, plan, time(result) if callable(time) else time)
        self.tried.append(done)
        return result, done

    def needs(
        self, run: ReplayedRun, plan: PlanChange, time: float, *, tune: bool = True, fails: bool = False
    ) -> PlanRun:
        """Return what a run needs.

        Args:
            run: the run.
            plan: the plan under which it ran; settings of the allocator in it are applied.
            time: of a step, relative to the script as written.
            tune: whether it may get expandable segments if it fits only with them.
            fails: whether it is known not to fit the GPU.
        """
        conf = plan.change.conf
        under = replace(run, conf=conf)
        reserved = under.needs(self._gpu, fails=fails)
        needs = process_bytes(reserved, run.trace.device)
        if tune and self._tune and needs.bytes > self._budget:
            expandable = expandable_segments(run.trace)
            if expandable is not None:
                tuned = self.needs(run, plan | expandable, time, tune=False)
                if tuned.needs.bytes < needs.bytes:
                    return tuned
        return PlanRun(
            plan.settings,
            needs,
            reserved,
            time,
            run.found.peak_place,
            conf,
            plan.divided,
            plan.change.fused,
            tuple(run.found.terms),
            self._compiled,
            under.unlimited.peak_allocated if conf else run.found.peak_allocated,
        )


def replayed(result: TrialResult) -> ReplayedRun:
    """Return a run whose requests can be replayed.

    Raises:
        MemfitError: its history is incomplete, or the allocator was not PyTorch's own.
    """
    return ReplayedRun.of(result.trace, summarize(result.trace))
