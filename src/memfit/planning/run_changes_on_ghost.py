"""Run changes to a script on the ghost: what it then needs, and what holds the memory at its peak."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.needed_memory import ReplayableRun, process_bytes_with_reserved
from memfit.analysis.trial_result import RunTrial, TrialResult
from memfit.devices import Device
from memfit.planning.module_checkpoint_options import FREE
from memfit.planning.strategy_and_allocator_changes import expandable_segments_change
from memfit.records import Change, HostUnits, Operation, PlanRun, ScriptEnd, StepOperations, StepTime
from memfit.timing.kernel_times import KernelTimes
from memfit.timing.saved_kernel_factors import saved_kernel_factors

RunAhead = Callable[[Sequence[tuple[Change, str]]], None]
"""Makes runs that a search will or may ask for, given the change and the name of each, side by side."""


@dataclass(frozen=True, slots=True)
class PlannedScript:
    """A script to be planned for, and what is known about the card."""

    run: RunTrial
    """With unlimited memory."""
    seconds: Callable[[Operation], float]
    """How long an operation takes."""
    copy: Callable[[int], float]
    """How long it takes to copy bytes to the host and back."""
    rule: str
    """What the times are based on."""
    ranks: int = 1
    """GPUs, with a rank of the job on each."""
    run_ahead: RunAhead = lambda _: None
    """What a search lets runs be made with before it asks for them; the answer is the same."""
    host: HostUnits = FREE
    """Seconds that the host needs for what plans add: regions, the tensors saved in them, operations under a
    dispatch mode. 0 where it is ahead of the GPU anyway."""

    def is_to_be_sharded(self, plain: TrialResult) -> bool:
        """Return whether there are several GPUs, and the script as written trains on one."""
        return self.ranks > 1 and plain.trace.device.nccl is None


class PlanRuns:
    """The runs of a search, in order.

    Args:
        run_trial: runs the script under a change, with unlimited memory.
        budget: bytes of the process within which a run fits.
        tune: whether runs that do not fit may get expandable segments.
        compiled: whether ``torch.compile`` compiles the script's code.
        written: the time of a step of the script as written; None if it is not known.
    """

    def __init__(
        self,
        run_trial: RunTrial,
        budget: int,
        *,
        tune: bool,
        compiled: bool = False,
        written: StepTime | None = None,
    ) -> None:
        self.written = written
        """The time of a step with which those of the runs are compared."""
        self.watched = written
        """The same of a run whose operations were recorded: under the record, regions that a script
        checkpoints itself seem to save more tensors, which take the host time."""
        self.again = 0.0
        """The time of running the model's forward on a batch again, relative to a step of the script as
        written; 0 if the model returns its loss, so that nothing runs again in slices."""
        self._run_trial, self._tune, self._compiled = run_trial, tune, compiled
        self.budget = budget
        """Bytes of the process within which a run fits."""
        self.count = 0
        """How many runs were begun."""
        self.tried: list[PlanRun] = []
        self.chosen: PlanRun | None = None
        """The fastest so far that fits; a search sets it."""
        self.models: tuple[str, ...] = ()
        """Models that got the last plan that a search went on with."""
        self.dropped: list[str] = []
        """As in ``ScriptPlan``."""

    def drop(self, plan: Change, why: str) -> None:
        """Note why a plan could not be run.

        Args:
            plan: the plan.
            why: a clause or a sentence.
        """
        self.dropped.append(f"With {', '.join(plan.words)}, {why.rstrip('.')}.")

    def fits(self, run: PlanRun) -> bool:
        """Return whether a run fits the budget."""
        return run.needs.bytes <= self.budget

    def run(self, plan: Change, *, operations: bool = False) -> tuple[TrialResult, ReplayableRun] | ScriptEnd:
        """Run a plan, but for settings of the allocator, which a replay applies.

        Args:
            plan: the plan.
            operations: whether the operations of a step are recorded.
        """
        change, what = self.next_run(plan, operations=operations)
        self.count += 1
        result = self._run_trial(change, what)
        return result if isinstance(result, ScriptEnd) else (result, replayable_run_of_trial(result))

    def next_run(self, plan: Change, after: int = 0, *, operations: bool = False) -> tuple[Change, str]:
        """Return the change and the name with which ``run`` runs a plan.

        Args:
            plan: the plan.
            after: how many others run before it.
            operations: whether the operations of a step are recorded.
        """
        change = replace(plan, allocator="", operations=operations, finish_late=plan.uses_side_streams)
        return change, f"{', '.join(plan.words)} (plan {self.count + after + 1})"

    def make(
        self, plan: Change, time: float | Callable[[TrialResult], float], *, operations: bool = False
    ) -> tuple[TrialResult, PlanRun] | ScriptEnd:
        """Run a plan, and add what it needs to ``tried``, with the time of its own step.

        Args:
            plan: the plan.
            time: of a step, relative to the script as written, or what computes it from the result. It counts
                where the time of the run's step is not known.
            operations: whether the operations of a step are recorded.
        """
        made = self.run(plan, operations=operations)
        if isinstance(made, ScriptEnd):
            return made
        result, run = made
        own, written = run.found.step_time, self.watched if operations else self.written
        if own is not None and written is not None:
            time = own.seconds / written.seconds + self.more_in_slices(plan)
        elif callable(time):
            time = time(result)
        done = self.needs([run, *map(replayable_run_of_trial, result.others)], plan, time)
        done = replace(done, operations=result.counts)
        self.tried.append(done)
        return result, done

    def make_for_time(
        self, plan: Change, time: Callable[[TrialResult], float]
    ) -> tuple[TrialResult, PlanRun] | ScriptEnd:
        """Do what ``make`` does; operations are recorded if the time would not be known without them."""
        return self.make(plan, time, operations=self.written is None)

    def more_in_slices(self, plan: Change) -> float:
        """Return the time that a plan takes if slices do what it leaves to the loop; that is 0 if nothing is.

        A search counts it: it answers with slices.
        """
        return self.again * (plan.parts - 1) / plan.parts if is_made_by_loop(plan) else 0.0

    def made_by_loop(self, run: PlanRun) -> PlanRun:
        """Return a run with the time that it takes if the loop divides batches."""
        more = self.more_in_slices(run.change)
        return replace(run, time=run.time - more) if more else run

    def needs(
        self,
        runs: Sequence[ReplayableRun],
        plan: Change,
        time: float,
        *,
        tune: bool = True,
        fails_at: int = 0,
    ) -> PlanRun:
        """Return what a plan needs: the most of its runs.

        Args:
            runs: of the ranks that may need most.
            plan: the plan under which they ran; settings of the allocator in it are applied.
            time: of a step, relative to the script as written.
            tune: whether they may get expandable segments if all fit only with them.
            fails_at: bytes of a GPU on which a run is known not to fit.
        """
        most = max((self._needs(run, plan, time, fails_at) for run in runs), key=_bytes)
        if tune and self._tune and most.needs.bytes > self.budget:
            expandable = expandable_segments_change(runs[0].trace)
            if expandable is not None:
                tuned = self.needs(runs, plan | expandable, time, tune=False)
                return min(most, tuned, key=_bytes)
        return most

    def _needs(self, run: ReplayableRun, plan: Change, time: float, fails_at: int) -> PlanRun:
        under = replace(run, conf=plan.allocator)
        reserved = under.needs(fails_at)
        rank = run.trace.rank
        return PlanRun(
            plan,
            process_bytes_with_reserved(reserved, run.trace.device),
            reserved,
            time,
            run.found.peak_place,
            tuple(run.found.terms),
            self._compiled,
            under.unlimited.peak_allocated if plan.allocator else run.found.peak_allocated,
            None if rank is None else rank.rank,
        )


def is_made_by_loop(plan: Change) -> bool:
    """Return whether a plan takes a change of the training loop, or slices instead."""
    return plan.micro_batches is not None and plan.micro_batches.by_hand


def _bytes(run: PlanRun) -> int:
    return run.needs.bytes


def replayable_run_of_trial(result: TrialResult) -> ReplayableRun:
    """Return a run whose requests can be replayed.

    Raises:
        MemfitError: its history is incomplete, or the allocator was not PyTorch's own.
    """
    return ReplayableRun.of(result.trace, dry_run_of_trace(result.trace))


def replayable_runs_of_ranks(result: TrialResult) -> list[ReplayableRun]:
    """Return the runs of all ranks, as ``replayable_run_of_trial`` does."""
    return [replayable_run_of_trial(each) for each in (result, *result.others)]


RULE = "kernels as others measured them on this card or its nearest relative"


def kernel_time_estimator(device: Device, torch_version: str = "") -> Callable[[Operation], float]:
    """Return how many seconds an operation takes on a card.

    Args:
        device: the card.
        torch_version: with which this machine's measurement of the card counts, if there is one.

    >>> from memfit.devices import find_device
    >>> from memfit.records import Operand
    >>> square, size = Operand((4096, 4096), "bfloat16"), 3 * 4096**2 * 2
    >>> product = Operation(
    ...     *("aten.mm.default", 0, -1, (5, 6), (7,), (), 2 * 4096**3, size, "bfloat16", False, 0.0, 0),
    ...     operands=(square, square),
    ...     results=(square,),
    ...     launches=1,
    ... )
    >>> 0.4e-3 < kernel_time_estimator(find_device("A100-80GB"))(product) < 0.7e-3
    True
    """
    factors = saved_kernel_factors(device, torch_version) if torch_version else {}
    times = KernelTimes(device, factors=factors)
    return functools.cache(lambda operation: times.of(operation).seconds)


def host_copy_time_estimator(device: Device) -> Callable[[int], float]:
    """Return how many seconds it takes to copy bytes to the host and back, beside nothing else."""
    return lambda size: 2 * size / device.host_bandwidth


_NUMBER = 8
"""Bytes of one number at most."""


def seconds_to_run_model_again(step: StepOperations, seconds: Callable[[Operation], float]) -> float:
    """Return the seconds of the model's forward; 0 if it returns its loss: slices then run once.

    The loop may divide the loss, as transformers' Trainer does.
    """
    last = max((operation.source for operation in step.backward), default=-1)
    if last >= 0 and step.forward[last].call >= 0:
        return 0.0
    inside = {operation.source for operation in step.backward if step.forward[operation.source].call >= 0}
    if inside:
        result = step.forward[max(inside)]
        sizes = [step.storages[storage] for storage in result.creates]
        if result.single or (sizes and max(sizes) <= _NUMBER):
            return 0.0
    return sum(seconds(operation) for operation in step.forward if operation.call >= 0)


def forward_and_backward_seconds(step: StepOperations, seconds: Callable[[Operation], float]) -> float:
    """Return the seconds of the forward and the backward of a step."""
    return sum(seconds(operation) for operation in (*step.forward, *step.backward))
