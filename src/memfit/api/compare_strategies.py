"""Compare strategies for a script: each row of the result is a run of the script on the ghost."""

from collections.abc import Callable, Sequence
from pathlib import Path

from memfit.analysis.strategy_comparison import (
    StrategyCombination,
    compared_run_from_failure,
    compared_run_of_trial,
    refusal_of_strategies,
    strategies_to_compare,
    with_change_from_first_run,
)
from memfit.analysis.trial_result import TrialResult
from memfit.devices import DEFAULT
from memfit.errors import TargetError
from memfit.records import Change, ComparedRun, DeviceUse, ScriptEnd, StrategyComparison
from memfit.run.job_rank import Rank
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import ScriptProgress, checked_script_argv
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.trials.rank_runs import RankRun, RankRuns, UnfinishedRankError


def compare(  # noqa: PLR0913 - one parameter an option
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    gpu: str = DEFAULT,
    memory: int | None = None,
    in_use: int = 0,
    nproc: int = 1,
    nnodes: int = 1,
    steps: int | None = STEPS,
    values: str = "",
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
) -> StrategyComparison:
    """Return what an unmodified script would need with each of memfit's strategies; needs no GPU.

    memfit runs the script once for each row, without input and with its output hidden; each run writes the
    script's output files again. On several GPUs, the ranks share each batch of the script's.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        module: run a module as ``python -m`` does.
        gpu: name of a device in the table (``memfit gpus``).
        memory: bytes of device memory instead of that device's.
        in_use: bytes of device memory that other processes hold.
        nproc: processes on each machine, with a GPU each; for more than one, shardings are compared, too. Of
            a script that shards itself, options of its own calls are compared in their place.
        nnodes: machines.
        steps: training steps after which memfit stops each run; None lets it run to its end.
        values: what the ghost returns when the script reads a GPU value, see ``RunOptions.values``.
        on_progress: called about ten times a second.

    Raises:
        MemfitError: the script or the device does not exist, this PyTorch or platform is not supported, or
            the script as written cannot be run.

    >>> compare("train.py", ["--batch-size", "8"], nproc=8, gpu="H100").runs[4].name  # doctest: +SKIP
    'DDP'
    """
    options = RunOptions(
        module=module,
        steps=steps,
        gpu=gpu,
        memory=memory,
        rank=Rank(nproc=nproc, nnodes=nnodes),
        in_use=in_use,
        values=values,
    )
    command = checked_script_argv(script, arguments, options, None)
    device = resolve_ghost_settings(options).device
    base = next(strategies_to_compare(1))
    with RankRuns(command, options, on_progress) as ranks:
        first, written = _as_written(base, command, device, ranks)
        _, *others = strategies_to_compare(
            options.rank.world_size, distributed=ranks.distributed, own=written.sharding_calls
        )
        runs, interrupted = [first], False
        refused: dict[Change, ScriptEnd] = {}
        try:
            for number, one in enumerate(others, 2):
                what = f"{one.name} ({number} of {len(others) + 1})"
                found = refusal_of_strategies(one, refused) or ranks.under(one.change, what)
                if isinstance(found, ScriptEnd):
                    runs.append(compared_run_from_failure(one, found))
                    if found.reason == "refused":
                        refused[one.change] = found
                else:
                    runs.append(_largest(one, found, device))
        except KeyboardInterrupt:
            interrupted = True
    return StrategyComparison(
        device=device,
        nproc=nproc,
        nnodes=nnodes,
        runs=with_change_from_first_run(runs),
        command=command,
        versions=written.trace.versions,
        distributed=ranks.distributed,
        sharding_calls=written.sharding_calls,
        interrupted=interrupted,
    )


def _as_written(
    base: StrategyCombination, command: tuple[str, ...], device: DeviceUse, ranks: RankRuns
) -> tuple[ComparedRun, TrialResult]:
    """Run the script as written: on every rank, if it trains on several GPUs itself.

    Returns:
        The rank that needs most, and the run of one.

    Raises:
        TargetError: it fails.
    """
    try:
        runs = ranks.as_written(base.change, base.name)
    except UnfinishedRankError as error:
        which = f"As {error.rank}, " if error.rank.world_size > 1 else ""
        why = compared_run_from_failure(base, error.end).reason
        raise TargetError(f"{which}{command[0]} cannot be compared: {why}") from None
    largest = _largest(base, runs, device)
    if ranks.distributed:
        ranks.keep_largest(next(run.rank for run in runs if run.rank.rank == largest.rank))
    return largest, runs[0].first


def _largest(of: StrategyCombination, runs: list[RankRun], device: DeviceUse) -> ComparedRun:
    """Return the run of the rank that needs most."""
    compared = (compared_run_of_trial(of, run.rank.rank, run.first, run.late, device) for run in runs)
    return max(compared, key=lambda run: run.needs.bytes if run.needs is not None else 0)
