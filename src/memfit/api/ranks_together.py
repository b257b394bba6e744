"""A script's run as one of several ranks that torchrun has started, and the report on all of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from memfit.analysis.rank_roles import ranks_by_role, role_of, weight_of_rank
from memfit.analysis.stream_races import may_race, with_upper_bound
from memfit.analysis.trial_result import TrialResult
from memfit.api.ghost_runs import LATE, RANK, FinishedRun, own_file, save_trace
from memfit.api.traces import summarize
from memfit.devices import NO_LIMIT
from memfit.records import Change
from memfit.run.options import RunOptions
from memfit.run.parent import PATIENCE, Progress, run_script, script_command
from memfit.run.resolve_options import ghost_settings
from memfit.run.started_by_torchrun import SharedTraces
from memfit.trace.trace_file import read_trace, write_trace
from memfit.trials.trial_run import trial_runner

_RACES, _RAN = "streams race", "ran"


def run_beside_ranks(
    script: str | Path,
    arguments: Sequence[str],
    options: RunOptions,
    environment: Mapping[str, str],
    *,
    output: Path | None,
    on_progress: Callable[[Progress], None],
) -> FinishedRun | None:
    """Run a script as the rank as which torchrun has started this process, beside the others.

    Args:
        script: as for ``dry_run``, like ``arguments``.
        arguments: of the script.
        options: with that rank, and ``real_ranks``.
        environment: that of this process.
        output: where to save the trace of the rank that needs most.
        on_progress: called about ten times a second.

    Returns:
        On the first rank of each machine, the result of the rank there that needs most, with all roles beside
        it; elsewhere None. If the script fails here, this rank's result.
    """
    command = script_command(script, arguments, options, output)
    early = SharedTraces(options.rank, environment, "early")
    recorded = run_script(command, options, ghost_settings(options), early.prepare(), on_progress, PATIENCE)
    result = summarize(recorded.trace)
    if result.end.reason not in ("end", "steps") or result.end.gave_up:
        early.abandon()
        return FinishedRun(
            recorded.trace, result, save_trace(recorded.trace, own_file(output, options.rank.rank))
        )
    late = None
    if _RACES in early.exchange(_RACES * may_race(recorded.trace)).values():
        late = SharedTraces(options.rank, environment, "late")
        path = late.prepare()
        unlimited = replace(options, memory=NO_LIMIT, finish_late=True)
        run = trial_runner(command, unlimited, result.device.total.bytes, on_progress)
        trial = run(Change(), LATE)
        if isinstance(trial, TrialResult):
            write_trace(trial.trace, path)
        if not all(late.exchange(_RAN * isinstance(trial, TrialResult)).values()):
            late = None
    if options.rank.local:
        return None
    ranks = {
        rank: _read(rank, early, late)
        for rank in range(options.rank.rank, options.rank.rank + options.rank.nproc)
    }
    (late or early).remove()
    largest = max(ranks.values(), key=lambda rank: weight_of_rank(rank.result))
    roles = ranks_by_role((number, role_of(number, rank.result)) for number, rank in ranks.items())
    to_save = {output: largest.trace}
    if output is not None and RANK in output.name:
        to_save = {own_file(output, number): rank.trace for number, rank in ranks.items()}
    unsaved = [save_trace(trace, path) for path, trace in to_save.items()]
    result = replace(largest.result, ranks=roles)
    return FinishedRun(largest.trace, result, next(filter(None, unsaved), None))


def _read(rank: int, early: SharedTraces, late: SharedTraces | None) -> FinishedRun:
    """Return what a rank holds: at most, if streams race."""
    trace = read_trace(early.trace(rank))
    result = summarize(trace)
    if late is None:
        return FinishedRun(trace, result, None)
    most = replace(read_trace(late.trace(rank)), device=trace.device, command=trace.command)
    bound = with_upper_bound(result, summarize(most))
    return FinishedRun(trace, result, None) if bound.range is None else FinishedRun(most, bound, None)
