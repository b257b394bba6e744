"""Train a few steps under a plan on a GPU, for the memory that the plan needs there."""

from collections.abc import Callable
from dataclasses import replace

from memfit.analysis.summary import summarize
from memfit.analysis.trial_result import ran_to_completion, why_it_failed
from memfit.errors import TargetError
from memfit.planning.plan_file import PlanFile
from memfit.records import MeasuredPeak
from memfit.records.job_target import command_as_typed
from memfit.run.options import RunOptions
from memfit.run.parent import Progress, run_script
from memfit.trials.trial_run import injected


def measured_peak(
    command: tuple[str, ...], plan: PlanFile, *, module: bool, on_progress: Callable[[Progress], None]
) -> MeasuredPeak:
    """Return the peak of a script under a plan over its first steps, as ``memfit record`` measures it.

    Args:
        command: the script's ``sys.argv``.
        plan: the plan. Its prediction is for the command that it was made for.
        module: as in ``RunOptions``.
        on_progress: called about ten times a second.

    Raises:
        TargetError: the script never used the GPU, or failed, or its process died.
    """
    change = plan.change

    def show(progress: Progress) -> None:
        on_progress(replace(progress, trying="under the plan, for its peak"))

    options = RunOptions(module=module, labels=False, allocator=change.allocator)
    with injected(change, options) as injection:
        trace = run_script(command + change.arguments, injection.options, None, None, show).trace
    if not ran_to_completion(trace.end):
        raise TargetError(
            f"memfit trained {command_as_typed(command)[0]} under the plan, but {why_it_failed(trace.end)}"
        )
    found = summarize(trace)
    return MeasuredPeak(
        found.peak_allocated,
        found.peak_reserved,
        found.peak_process,
        plan.allocated_for(command),
    )
