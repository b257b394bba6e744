"""A script's run on the ghost: as one process, or as every rank of a job in turn."""

import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.analysis.equivalent_ranks import (
    find_what_ranks_hold,
    group_equivalent_ranks,
    rank_run_sort_key,
    what_one_rank_holds,
)
from memfit.analysis.needed_memory import process_bytes_on_smallest_gpu
from memfit.analysis.peak_outside_failed_attempts import failed_allocation_events
from memfit.analysis.side_stream_peak_range import (
    may_side_streams_change_peak,
    with_side_stream_range,
    without_late_run,
)
from memfit.analysis.total_need_by_rerun import (
    assumes_worst_token_routing,
    even_routing_option,
    find_total_need,
    with_even_routing_note,
)
from memfit.analysis.trial_result import TrialResult
from memfit.api.traces import summarize
from memfit.errors import MemfitError, OutputError, TargetError, UsageError
from memfit.planning.advice import find_advice
from memfit.records import (
    Change,
    DeviceUse,
    DryRun,
    EquivalentRanks,
    Note,
    Provenance,
    ScriptLocation,
    StepTime,
    Trace,
)
from memfit.run.launchers import check_world_size_is_one
from memfit.run.options import RunOptions
from memfit.run.parent import PATIENCE, RecordedRun, ScriptProgress, checked_script_argv, run_script
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.strategies.read_plan_or_settings import read_plan_or_settings
from memfit.temporary_folders import TemporaryFolder
from memfit.trace.trace_file import write_trace
from memfit.trials.script_standbys import ScriptRun, ScriptStandbys
from memfit.trials.trial_run import prepare_injection, trial_runner

LATE = "GPU work that finishes late"
"""The run that finds the most that a script may need where streams race, as the user sees it."""
RANK = "{rank}"
"""In the name of a trace's file: its rank."""


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A script's run and its result."""

    trace: Trace
    result: DryRun
    unsaved: OutputError | None
    """Why the trace is not in its file; None if it is, or if the caller named no file."""

    def saved(self) -> DryRun:
        """Return the result.

        Raises:
            OutputError: the trace could not be saved.
        """
        if self.unsaved is not None:
            raise self.unsaved
        return self.result


def run_on_ghost(  # noqa: PLR0913 - what a dry run is asked for
    script: str | Path,
    arguments: Sequence[str],
    options: RunOptions,
    *,
    output: Path | None,
    advise: bool = False,
    all_ranks: bool = False,
    plan: Path | None = None,
    resume_with: Sequence[str] | None = None,
    on_progress: Callable[[ScriptProgress], None],
) -> FinishedRun:
    """Do what ``dry_run`` does, and return a result whose trace may not have been saved.

    Raises:
        UsageError: what is asked for does not go together, or the plan does not suit the script.
        TargetError: the script failed or was stopped, so that it may have written nothing to resume from.
        MemfitError: one of the runs was not possible.
    """
    _expect_to_go_together(options, advise=advise, resume_with=resume_with)
    change = Change()
    if plan is not None:
        change, options = _planned(plan, options)
    job = _GhostJob(script, arguments, options, change, on_progress)
    first = job.run(output, advise=advise, all_ranks=all_ranks)
    end = first.result.end
    if resume_with is None or first.result.ran_out or end.reason == "interrupted":
        return first
    if end.reason != "end" or end.exit_code:
        how = "Its time was up: pass more --seconds." if end.stopped else end.exception
        raise TargetError(
            f"Cannot resume {first.result.command[0]}: its first run did not come to its end. {how}"
        )
    again = replace(job, arguments=(*arguments, *resume_with))
    return _larger_of(first, again.run(None, advise=advise, all_ranks=all_ranks), output)


def _expect_to_go_together(options: RunOptions, *, advise: bool, resume_with: Sequence[str] | None) -> None:
    """Check that what a dry run is asked for does not contradict itself."""
    if options.batches is not None and advise:
        raise UsageError(
            "--advise lowers the peak of training steps. Run --whole first, which names the stage that needs "
            "most, and then --advise without --whole."
        )
    batches, seconds = options.batches, options.seconds
    if (batches is not None and batches < 1) or (seconds is not None and not seconds > 0):
        raise UsageError("--batches must be at least 1, and --seconds more than 0.")
    if options.scan is not None and not options.scan > 0:
        raise UsageError("--scan must be more than 0.")
    if isinstance(resume_with, str):
        raise UsageError(f"resume_with is a list of words: {shlex.split(resume_with)}.")
    if resume_with is not None and options.batches is None:
        raise UsageError("--resume-with runs a whole script twice: add --whole.")


def _planned(file: Path, options: RunOptions) -> tuple[Change, RunOptions]:
    """Return what a plan changes about a script, and the options with which the script runs under it."""
    planned = read_plan_or_settings(file)
    rank = options.rank
    if planned.is_sharded:
        if rank.world_size == 1:
            raise UsageError(
                f"{file} shards the model over {planned.world_size} GPUs. Say how many there are, as in "
                f"memfit dry-run --nproc {planned.nproc}"
                f"{f' --nnodes {planned.nnodes}' * (planned.nnodes > 1)} --all-ranks --plan {file}."
            )
        rank = replace(rank, own_gpu_only=True)
    return planned.change, replace(options, rank=rank, allocator=planned.change.allocator)


def _larger_of(first: FinishedRun, resumed: FinishedRun, output: Path | None) -> FinishedRun:
    """Return the run that needs most of a script's own and the one that resumed, with the stages of both."""
    stages = (*first.result.stages, *(replace(use, resumed=True) for use in resumed.result.stages))
    shortened = tuple(dict.fromkeys((*first.result.shortened, *resumed.result.shortened)))
    if _severity(resumed.result) <= _severity(first.result):
        return replace(first, result=replace(first.result, stages=stages, shortened=shortened))
    failed = resumed.result.out_of_memory
    result = replace(
        resumed.result,
        stages=stages,
        shortened=shortened,
        peak_place=_in_resumed(resumed.result.peak_place),
        out_of_memory=failed and replace(failed, place=_in_resumed(failed.place)),
        resumed=True,
    )
    return FinishedRun(resumed.trace, result, try_to_save_trace(resumed.trace, output))


def _in_resumed(place: ScriptLocation) -> ScriptLocation:
    return replace(place, stage=f"{place.stage or 'the run'}, resumed")


def _severity(result: DryRun) -> tuple[bool, tuple[bool, int]]:
    return result.ran_out, rank_run_sort_key(result)


@dataclass(frozen=True, slots=True)
class _GhostJob:
    """A script, with the options and the change with which it runs."""

    script: str | Path
    arguments: Sequence[str]
    options: RunOptions
    change: Change
    on_progress: Callable[[ScriptProgress], None]

    def run(self, output: Path | None, *, advise: bool = False, all_ranks: bool = False) -> FinishedRun:
        """Run the script once, as one process or as every rank in turn."""
        rank = self.options.rank
        if rank.world_size > 1 and not self.options.objects:
            with TemporaryFolder() as folder:  # for all runs of the job
                job = replace(self, options=replace(self.options, objects=folder))
                return job.run(output, advise=advise, all_ranks=all_ranks)
        if all_ranks:
            if advise:
                raise UsageError(
                    "--advise looks at one rank, and --all-ranks at all of them: run --all-ranks first, and "
                    "then --advise with the --rank that needs most."
                )
            return self._run_all_ranks(output)
        output = trace_file_of_rank(output, rank.rank)
        if rank.world_size == 1:
            check_world_size_is_one(os.environ)
        command = checked_script_argv(self.script, self.arguments, self.options, output)
        with ScriptStandbys() as standbys:
            return self._run_and_ask_again(command, output, standbys, advise=advise)

    def _run_and_ask_again(
        self, command: tuple[str, ...], output: Path | None, standbys: ScriptStandbys, *, advise: bool
    ) -> FinishedRun:
        """Run the script, and again for what its first run leaves open."""
        recorded = self._recorded(command, output, standbys, injects=advise)
        result = summarize(recorded.trace)
        unlimited = replace(self.options, unlimited=True)
        run_trial = trial_runner(command, unlimited, self.on_progress, self.change, standbys)
        if advise:
            advised = find_advice(recorded.trace, result, run_trial)
            return FinishedRun(recorded.trace, advised, recorded.unsaved)
        result = find_total_need(result, run_trial)
        if assumes_worst_token_routing(recorded.trace):
            even = replace(unlimited, values=even_routing_option(self.options.values))
            result = with_even_routing_note(
                result, trial_runner(command, even, self.on_progress, self.change)
            )
        found = FinishedRun(recorded.trace, result, recorded.unsaved)
        if result.verdict in ("fits", "tight") and may_side_streams_change_peak(recorded.trace):
            late_work = Change(finish_late=True)
            on_this_gpu = trial_runner(command, self.options, self.on_progress, self.change, standbys)
            late = on_this_gpu(late_work, LATE)
            fits = isinstance(late, TrialResult) and _fits(late.trace, result.device)
            late = late if fits else run_trial(late_work, LATE)
            if not isinstance(late, TrialResult):
                return replace(found, result=without_late_run(result, late))
            most = larger_need_with_late_streams(found, late.trace, fits=fits)
            return found if most is found else replace(most, unsaved=try_to_save_trace(most.trace, output))
        return found

    def _recorded(
        self, command: tuple[str, ...], output: Path | None, standbys: ScriptStandbys, *, injects: bool
    ) -> RecordedRun:
        """Run the script under the change; it leaves the standby.

        With ``injects``, strategies can be applied to the standby.
        """
        options, change, show = self.options, self.change, self.on_progress
        ghost = resolve_ghost_settings(options)
        run = ScriptRun(command, options, ghost, change)
        if change == Change() and not injects:
            with standbys.whole(run) as start:
                return run_script(command, options, ghost, output, show, PATIENCE, start)
        with prepare_injection(change, options, silent=False) as injection, standbys.whole(run) as start:
            changed = command + change.arguments
            recorded = run_script(changed, injection.options, ghost, output, show, PATIENCE, start)
            if why := injection.why_unfit():
                raise UsageError(f"The plan does not suit {command[0]}: {why}")
            return recorded

    def _run_all_ranks(self, output: Path | None) -> FinishedRun:
        """Run a rank of every role; the result is that of the rank that needs most, with all roles."""
        job = self.options.rank
        if job.world_size == 1:
            raise UsageError("--all-ranks: the job has one rank. Say how many it has, as in --nproc 8.")
        checked_script_argv(
            self.script, self.arguments, self.options, output
        )  # checks them before any rank runs
        one_each = output is not None and RANK in output.name
        unsaved: list[OutputError | None] = []
        largest: FinishedRun | None = None
        slowest: StepTime | None = None

        def run(number: int) -> EquivalentRanks:
            nonlocal largest, slowest
            rank = replace(job, rank=number)

            def show(progress: ScriptProgress) -> None:
                self.on_progress(replace(progress, rank=str(rank)))

            one = replace(self, options=replace(self.options, rank=rank), on_progress=show)
            try:
                found = one.run(trace_file_of_rank(output, number) if one_each else None)
            except MemfitError as error:
                raise type(error)(f"{str(rank).capitalize()}: {error}") from error
            if found.result.end.reason == "interrupted":
                raise KeyboardInterrupt
            unsaved.append(found.unsaved)
            times = (each for each in (slowest, found.result.step_time) if each is not None)
            slowest = max(times, key=lambda each: each.seconds, default=None)
            if largest is None or rank_run_sort_key(found.result) > rank_run_sort_key(largest.result):
                largest = found
            return what_one_rank_holds(number, found.result)

        held = find_what_ranks_hold(job.nproc, job.nnodes, run)
        if largest is None:
            raise AssertionError  # a job has ranks
        ran = sum(role.rank == rank for rank, role in held.items())
        roles = group_equivalent_ranks(held.items())
        result = replace(largest.result, ranks=roles, step_time=largest.result.step_time and slowest)
        if ran < job.world_size:
            text = (
                f"memfit ran {ran} of the {job.world_size:,} ranks. It assumed that each of the others holds "
                "the same as the ranks on the same GPU of machines before and after it, which hold the same."
            )
            result = replace(result, notes=(*result.notes, Note(Provenance.ASSUMED, text, sizes=True)))
        if not one_each:
            unsaved.append(try_to_save_trace(largest.trace, output))
        return FinishedRun(largest.trace, result, next(filter(None, unsaved), None))


def larger_need_with_late_streams(early: FinishedRun, late: Trace, *, fits: bool = True) -> FinishedRun:
    """Return the larger of two answers: a run, and the same with work on side streams that finishes late.

    Args:
        early: the run whose work is done at once.
        late: the trace of the other.
        fits: whether the late run is not known to fail on the GPU of ``early``.
    """
    trace = replace(late, device=early.trace.device, command=early.trace.command)
    found, needs = summarize(trace), early.result.needs
    if needs is not None:  # else the script adapts to its GPU
        at_most = found.peak_process
        if fits and _fits(trace, trace.device):
            at_most = process_bytes_on_smallest_gpu(trace, found, trace.device)
        found = replace(found, needs=max(needs, at_most, key=lambda figure: figure.bytes))
    result = with_side_stream_range(early.result, found)
    return early if result.range is None else FinishedRun(trace, result, None)


def _fits(trace: Trace, device: DeviceUse) -> bool:
    """Return whether a run had enough memory, and what it and NCCL took at most is there."""
    room = device.total.bytes - device.in_use
    return not len(failed_allocation_events(trace)) and summarize(trace).peak_process.bytes <= room


def trace_file_of_rank(output: Path | None, rank: int) -> Path | None:
    """Return the file of a rank's trace: ``{rank}`` in its name stands for the rank.

    >>> trace_file_of_rank(Path("run-{rank}.memfit"), 7)
    PosixPath('run-7.memfit')
    """
    return None if output is None else output.with_name(output.name.replace(RANK, str(rank)))


def try_to_save_trace(trace: Trace, output: Path | None) -> OutputError | None:
    """Write a trace to a file, if there is one; return why it could not be written."""
    if output is None:
        return None
    try:
        write_trace(trace, output)
    except OutputError as error:
        return error
    return None
