"""Compare strategies for a script: each row of the result is a run of the script on the ghost."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.analysis.strategy_comparison import (
    AS_IN,
    StrategyCombination,
    compared_run_from_failure,
    compared_run_of_trial,
    refusal_of_strategies,
    with_change_from_first_run,
)
from memfit.analysis.trial_result import TrialResult
from memfit.devices import DEFAULT, find_device
from memfit.errors import TargetError, UsageError
from memfit.planning.strategies_to_compare import (
    strategies_to_compare,
    why_unsuitable,
    with_dimension_of_samples,
)
from memfit.records import (
    Change,
    ComparedRun,
    DeviceUse,
    ScriptEnd,
    StepOperations,
    StepTime,
    StrategyComparison,
    equality_of,
)
from memfit.run.job_rank import Rank
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import ScriptProgress, checked_script_argv
from memfit.run.resolve_ghost_settings import resolve_ghost_settings
from memfit.strategies.read_plan_or_settings import read_plan_or_settings
from memfit.strategies.settings_files import SUFFIXES
from memfit.timing.step_time import step_time_of_trace
from memfit.trials.rank_runs import RankRun, RankRuns, UnfinishedRankError
from memfit.trials.runs_side_by_side import ProgressOfFirst, RunsAhead
from memfit.trials.trial_run import NO_MODEL

_NO_OPTIMIZER = ScriptEnd(
    "refused", 0, "memfit applies strategies to models whose parameters an optimizer takes, and finds none"
)


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
    rows: Sequence[str] = (),
    on_progress: Callable[[ScriptProgress], None] = lambda _: None,
) -> StrategyComparison:
    """Return memory and time of an unmodified script under each of memfit's strategies; needs no GPU.

    memfit runs the script once for each row, without input and with its output hidden; each run writes the
    script's output files again. Most runs go on from a copy of the first, made just before it trained. On
    several GPUs, the ranks share each batch of the script's.

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
        rows: names of rows, or of groups of them, and files of plans or settings, to be compared with the
            script as written; by default all rows.
        on_progress: called about ten times a second.

    Raises:
        UsageError: there is no such row.
        MemfitError: the script or the device does not exist, this PyTorch or platform is not supported, or
            the script as written cannot be run.

    >>> compare("train.py", ["--batch-size", "8"], gpu="H100").runs[1].name  # doctest: +SKIP
    'bf16'
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
    world_size = options.rank.world_size
    files = [Path(name) for name in rows if Path(name).suffix in SUFFIXES]
    _expect_known([name for name in rows if Path(name) not in files], strategies_to_compare(world_size))
    own = [StrategyCombination(f"{AS_IN}{file}", read_plan_or_settings(file).change) for file in files]
    command = checked_script_argv(script, arguments, options, None)
    device = resolve_ghost_settings(options).device
    progress = ProgressOfFirst(on_progress)
    with RankRuns(command, options, progress.show) as ranks:
        first, written = _as_written(command, device, ranks)
        plain = _Plain(written, step_time_of_trace(written.trace))
        base, *others = strategies_to_compare(
            world_size, distributed=ranks.distributed, own=written.sharding_calls, card=find_device(gpu)
        )
        chosen = [one for one in others if not rows or {one.name, one.group} & set(rows)] + own
        runs, interrupted = [_largest(base, first, device, plain)], False
        refused: dict[Change, ScriptEnd] = {}

        def run(one: StrategyCombination, what: str) -> ComparedRun | ScriptEnd:
            made = plain.refusal(one.change) or ranks.under(one.change, what)
            return made if isinstance(made, ScriptEnd) else _largest(one, made, device, plain)

        ahead = RunsAhead(run, progress)
        adapted = [
            (replace(one, change=plain.adapted(one.change)), f"{one.name} ({number} of {len(chosen) + 1})")
            for number, one in enumerate(chosen, 2)
        ]
        try:
            for index, (one, what) in enumerate(adapted):
                if world_size == 1:
                    pair = adapted[index : index + 2]
                    ahead.make([each for each in pair if not refusal_of_strategies(each[0], refused)])
                end = refusal_of_strategies(one, refused) or ahead.run(one, what)
                if isinstance(end, ScriptEnd) and plain.step is None and end.exception.endswith(NO_MODEL):
                    end = refused[Change()] = _NO_OPTIMIZER  # nor can any other
                runs.append(compared_run_from_failure(one, end) if isinstance(end, ScriptEnd) else end)
                if isinstance(end, ScriptEnd) and end.reason == "refused":
                    refused[one.change] = end
        except KeyboardInterrupt:
            interrupted = True
    step = written.operations
    return StrategyComparison(
        device=device,
        nproc=nproc,
        nnodes=nnodes,
        runs=with_change_from_first_run(runs),
        command=command,
        versions=written.trace.versions,
        distributed=ranks.distributed,
        sharding_calls=written.sharding_calls,
        rule=plain.time.basis if plain.time else "",
        draws=step is not None and any(each.random for each in step.forward),
        interrupted=interrupted,
    )


def _expect_known(rows: Iterable[str], known: Iterable[StrategyCombination]) -> None:
    """Check that there are rows, or groups of rows, of some names."""
    known = list(known)
    groups, names = dict.fromkeys(one.group for one in known if one.group), [one.name for one in known]
    for name in rows:
        if name not in groups and name not in names:
            raise UsageError(
                f"--rows: there is no row {name!r}. Groups of rows: {', '.join(groups)}. Rows: "
                f"{', '.join(names)}."
            )


@dataclass(frozen=True, slots=True)
class _Plain:
    """The script as written, with what the other rows are measured by."""

    result: TrialResult
    time: StepTime | None
    """Of a step; None if it is not known."""

    @property
    def step(self) -> StepOperations | None:
        return self.result.operations

    def adapted(self, change: Change) -> Change:
        """Return strategies as they suit the script's batches."""
        return with_dimension_of_samples(change, self.result.trace, self.step)

    def refusal(self, change: Change) -> ScriptEnd | None:
        """Return why strategies do not suit the script, if its own step shows that."""
        why = why_unsuitable(change, self.step)
        return ScriptEnd("refused", 0, why) if why else None

    def compared(self, run: ComparedRun, change: Change, under: TrialResult) -> ComparedRun:
        """Return a run with its time, and what it computes, compared with the script as written."""
        time = step_time_of_trace(under.trace)
        compiled = self.step is not None and self.step.compiled
        return replace(
            run,
            time=time.seconds / self.time.seconds if time and self.time else None,
            step_time=time,
            equality=equality_of(change, compiled=compiled),
        )


def _as_written(
    command: tuple[str, ...], device: DeviceUse, ranks: RankRuns
) -> tuple[list[RankRun], TrialResult]:
    """Run the script as written: on every rank, if it trains on several GPUs itself.

    Returns:
        A run of each role, and the run whose operations tell what suits the script.
    """
    base = next(strategies_to_compare(1))
    try:
        runs = ranks.as_written(Change(operations=True), base.name)
    except UnfinishedRankError as error:
        which = f"As {error.rank}, " if error.rank.world_size > 1 else ""
        why = compared_run_from_failure(base, error.end).reason
        raise TargetError(f"{which}{command[0]} cannot be compared: {why}") from None
    if ranks.distributed:
        largest = _largest_rank(base, runs, device).rank
        ranks.keep_largest(next(run.rank for run in runs if run.rank.rank == largest))
    return runs, runs[0].first


def _largest(of: StrategyCombination, runs: list[RankRun], device: DeviceUse, plain: _Plain) -> ComparedRun:
    """Return the run of the rank that needs most, compared with the script as written."""
    largest = _largest_rank(of, runs, device)
    under = next(run.first for run in runs if run.rank.rank == largest.rank)
    return plain.compared(largest, of.change, under)


def _largest_rank(of: StrategyCombination, runs: list[RankRun], device: DeviceUse) -> ComparedRun:
    """Return the run of the rank that needs most."""
    compared = (compared_run_of_trial(of, run.rank.rank, run.first, run.late, device) for run in runs)
    return max(compared, key=lambda run: run.needs.bytes if run.needs is not None else 0)
