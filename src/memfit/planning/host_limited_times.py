"""The times of operations that a solver compares where the host limits a step: the GPU waits for Python.

    tiny kernels        an operation takes what the host needs to issue it
    under a mode        one whose result may be kept takes the host several times as long

So a planner recomputes whole modules there, and keeps results of single operations where kernels take long.
"""

from dataclasses import replace

from memfit.analysis.trial_result import TrialResult
from memfit.planning.run_changes_on_ghost import PlannedScript
from memfit.records import Operation
from memfit.timing.step_time import host_times_of_trace, step_time_of_trace


def with_time_of_host(script: PlannedScript, plain: TrialResult) -> PlannedScript:
    """Return a script whose operations take what the host needs to issue them, if the host limits the step.

    Args:
        script: with the times of kernels.
        plain: its run as written.
    """
    step, time = plain.trace.step, step_time_of_trace(plain.trace)
    if step is None or time is None or not time.is_bound_by_host:
        return script
    kernel, issue = script.seconds, time.host_seconds / len(step.order)

    def seconds(operation: Operation) -> float:
        own = kernel(operation)
        return max(own, issue) if own else 0.0

    host = host_times_of_trace(plain.trace).one
    return replace(script, seconds=seconds, host=host)
