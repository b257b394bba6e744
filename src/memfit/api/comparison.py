"""Compare strategies for a script: each row of the result is a run of the script on the ghost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from memfit.analysis.rank_roles import find_held
from memfit.analysis.script_change import ScriptChange, TrialResult
from memfit.analysis.strategy_comparison import (
    ComparedStrategies,
    compared_run,
    compared_strategies,
    first_rank,
    impossible,
    ranks_with_most,
    refused_with,
)
from memfit.analysis.stream_races import may_race
from memfit.devices import DEFAULT, NO_LIMIT
from memfit.errors import TargetError
from memfit.records import ComparedRun, DeviceUse, ScriptEnd, StrategyComparison, Trace
from memfit.report.terminal.strategy_comparison import PrintableStrategyComparison
from memfit.run.options import STEPS, RunOptions
from memfit.run.parent import Progress, script_command
from memfit.run.rank import Rank
from memfit.run.resolve_options import ghost_settings
from memfit.strategies.script_standby import ScriptStandby
from memfit.strategies.trial_run import trial_runner


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
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> StrategyComparison:
    """Return what an unmodified script would need with each of memfit's strategies; needs no GPU.

    memfit runs the script once for each row, without input and with its output hidden; each run writes the
    script's output files again. On several GPUs, every rank trains on batches of the script's own size.

    Args:
        script: path of the script, or a module's name with ``module=True``.
        arguments: the script's own arguments.
        module: run a module as ``python -m`` does.
        gpu: name of a device in the table (``memfit gpus``).
        memory: bytes of device memory instead of that device's.
        in_use: bytes of device memory that other processes hold.
        nproc: processes on each machine, with a GPU each; for more than one, shardings are compared, too.
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
    return compare_on_ghost(script, arguments, options, on_progress)


def compare_on_ghost(
    script: str | Path,
    arguments: Sequence[str],
    options: RunOptions,
    on_progress: Callable[[Progress], None],
) -> StrategyComparison:
    """Do what ``compare`` does; ``options.rank`` says how many ranks there are."""
    command = script_command(script, arguments, options, None)
    with ScriptStandby() as standby:
        job = _StrategyRuns(command, options, ghost_settings(options).device, on_progress, standby)
        return _compared_on_ghost(job)


def _compared_on_ghost(job: "_StrategyRuns") -> StrategyComparison:
    """Run a script as written, which leaves the standby, and under each set of strategies."""
    command, options = job.command, job.options
    base, *others = compared_strategies(options.rank.world_size)
    rank, first, trace = job.as_written(base)
    distributed = trace.device.nccl is not None
    largest = {"": rank}
    if not distributed:
        rank = replace(options.rank, rank=first_rank(options.rank.nproc), own_gpu_only=True)
    runs, interrupted = [first], False
    refused: dict[ScriptChange, ScriptEnd] = {}
    try:
        for number, one in enumerate(others, 2):
            progress = f" ({number} of {len(others) + 1})"
            end = refused_with(one, refused)
            found = end or job.largest(one, largest.get(one.sharding), rank, progress)
            if isinstance(found, ScriptEnd):
                runs.append(impossible(one, found))
                if found.reason == "refused":
                    refused[one.change] = found
            else:
                largest.setdefault(one.sharding, found[0])
                runs.append(found[1])
    except KeyboardInterrupt:
        interrupted = True
    return PrintableStrategyComparison.of(
        StrategyComparison(
            device=job.device,
            nproc=options.rank.nproc,
            nnodes=options.rank.nnodes,
            runs=tuple(runs),
            command=command,
            versions=trace.versions,
            distributed=distributed,
            interrupted=interrupted,
        )
    )


@dataclass(frozen=True, slots=True)
class _StrategyRuns:
    """A script to be run under several sets of strategies."""

    command: tuple[str, ...]
    options: RunOptions
    device: DeviceUse
    on_progress: Callable[[Progress], None]
    standby: ScriptStandby

    def as_written(self, base: ComparedStrategies) -> tuple[Rank, ComparedRun, Trace]:
        """Run the script as written: on every rank, if it trains on several GPUs itself.

        Returns:
            The rank that needs most, what it needs, and the trace of rank 0.

        Raises:
            TargetError: it fails.
        """
        job = self.options.rank

        def run(number: int) -> tuple[ComparedRun, Trace]:
            rank = replace(job, rank=number)
            result = self._run(base, rank, "")
            if isinstance(result, ScriptEnd):
                which = f"As {rank}, " if job.world_size > 1 else ""
                why = impossible(base, result).reason
                raise TargetError(f"{which}{self.command[0]} cannot be compared: {why}")
            return self._compared(base, rank, result, ""), result.trace

        first, trace = run(0)
        if trace.device.nccl is None:
            return job, first, trace
        held = find_held(
            job.nproc, job.nnodes, lambda number: replace(run(number)[0] if number else first, rank=None)
        )
        number = max(held, key=lambda number: _bytes(held[number]))
        return replace(job, rank=number), replace(held[number], rank=number), trace

    def largest(
        self, of: ComparedStrategies, known: Rank | None, first: Rank, progress: str
    ) -> tuple[Rank, ComparedRun] | ScriptEnd:
        """Run the script under strategies, and return the rank that needs most, or why there is none.

        Args:
            of: the strategies.
            known: the rank that needs most with this sharding; None if it is not known yet.
            first: the rank to run first if it is not.
            progress: which of the runs this is.
        """
        rank = known or first
        result = self._run(of, rank, progress)
        if isinstance(result, ScriptEnd):
            return result
        found = [(rank, self._compared(of, rank, result, progress))]
        for number in ranks_with_most(result.shares, rank.nproc) if result.shares and known is None else ():
            other = replace(rank, rank=number)
            if other != rank and isinstance(again := self._run(of, other, progress), TrialResult):
                found.append((other, self._compared(of, other, again, progress)))
        return max(found, key=lambda each: _bytes(each[1]))

    def _compared(self, of: ComparedStrategies, rank: Rank, early: TrialResult, progress: str) -> ComparedRun:
        late = self._run(of, rank, progress, finish_late=True) if may_race(early.trace) else None
        return compared_run(
            of, rank.rank, early, late if isinstance(late, TrialResult) else None, self.device
        )

    def _run(
        self, of: ComparedStrategies, rank: Rank, progress: str, *, finish_late: bool = False
    ) -> TrialResult | ScriptEnd:
        """Run the script once, with unlimited memory."""
        options = replace(self.options, rank=rank, memory=NO_LIMIT, finish_late=finish_late)

        def show(now: Progress) -> None:
            self.on_progress(replace(now, rank=str(rank) if rank.world_size > 1 else ""))

        run = trial_runner(self.command, options, self.device.total.bytes, show, standby=self.standby)
        result = run(of.change, f"{of.name}{progress}")
        if result is None:
            raise AssertionError  # trial_runner's function runs the script
        return result


def _bytes(run: ComparedRun) -> int:
    return run.needs.bytes if run.needs is not None else 0
