"""Run a script as the ranks of a job that may need most.

| the script                     | ranks                                                                |
|--------------------------------|----------------------------------------------------------------------|
| trains on several GPUs itself  | as written every rank, then one rank of each role                    |
| trains on one GPU              | rank 0                                                               |
| with a sharding of ours        | one inside NCCL's chain; with ZeRO-1, those with the largest shares  |
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.analysis.equivalent_ranks import find_what_ranks_hold
from memfit.analysis.side_stream_peak_range import may_side_streams_change_peak
from memfit.analysis.strategy_comparison import first_rank_that_holds_most, ranks_that_may_need_most
from memfit.analysis.trial_result import TrialResult, why_run_failed
from memfit.records import Change, ScriptEnd, ScriptLocation
from memfit.run.job_rank import Rank
from memfit.run.options import RunOptions
from memfit.run.parent import ScriptProgress
from memfit.trials.script_standbys import ScriptStandbys
from memfit.trials.trial_run import trial_runner


@dataclass(frozen=True, slots=True)
class RankRun:
    """A rank's run under a change, with unlimited memory."""

    rank: Rank
    first: TrialResult
    late: TrialResult | None
    """The same, with GPU work that finishes late; None if no streams race, or all work did so already."""

    @property
    def results(self) -> tuple[TrialResult, ...]:
        """Its runs."""
        return (self.first,) if self.late is None else (self.first, self.late)


class UnfinishedRankError(Exception):
    """A rank of the script as written did not complete."""

    def __init__(self, rank: Rank, end: ScriptEnd) -> None:
        super().__init__(rank, end)
        self.rank, self.end = rank, end


@dataclass(frozen=True, slots=True)
class _RankMemory:
    """What tells ranks apart. Of ranks that differ in NCCL's memory alone, one runs under changes."""

    allocated: int
    reserved: int
    place: ScriptLocation
    nccl: int


class RankRuns:
    """Runs a script under changes, as some ranks of a job. Use it as a context manager."""

    def __init__(
        self, command: tuple[str, ...], options: RunOptions, on_progress: Callable[[ScriptProgress], None]
    ) -> None:
        self._command, self._options = command, options
        self._on_progress = on_progress
        self._standbys: dict[int, ScriptStandbys] = {}
        self._ranks: dict[str, tuple[Rank, ...]] = {}
        """By sharding: the ranks that may need most. First comes the rank that needed most as written."""
        self.count = 0
        """Ranks that ran as written."""
        self.distributed = False
        """Whether the script as written trains on several GPUs."""

    def as_written(self, change: Change, what: str) -> list[RankRun]:
        """Run the script as written, the first time: on every rank, if it trains on several GPUs itself.

        Returns:
            A run of each role, the one that needs most first.

        Raises:
            UnfinishedRankError: a rank did not complete.
        """
        job = self._options.rank
        first = self._completed(change, what, job)
        self.distributed = first.first.trace.device.nccl is not None
        if not self.distributed:
            self._ranks[""], self.count = (job,), 1
            return [first]
        roles: dict[_RankMemory, RankRun] = {}
        ran = 0

        def held_by(number: int) -> _RankMemory:
            nonlocal ran
            found = first if number == job.rank else self._completed(change, what, replace(job, rank=number))
            ran += 1
            held = _held(found)
            role = replace(held, nccl=0)
            if role not in roles or held.nccl > _held(roles[role]).nccl:
                roles[role] = found
            return held

        find_what_ranks_hold(job.nproc, job.nnodes, held_by)
        runs = sorted(roles.values(), key=_process, reverse=True)
        self._ranks[""], self.count = tuple(run.rank for run in runs), ran
        for number in self._standbys.keys() - {run.rank.rank for run in runs}:
            self._standbys.pop(number).__exit__()
        return runs

    def keep_largest(self, rank: Rank) -> None:
        """Run no role but a rank's from now on, where the script trains on several GPUs itself."""
        self._ranks[""] = (rank,)

    def under(self, change: Change, what: str) -> list[RankRun] | ScriptEnd:
        """Run the script under a change, after ``as_written``.

        Returns:
            A run of each rank that may need most; or, if a run did not complete, how it ended.
        """
        sharding = _sharding_mode(change)
        if sharding in self._ranks:
            return self._run_all(change, what, self._ranks[sharding])
        job = self._options.rank
        inside = replace(job, rank=first_rank_that_holds_most(job.nproc), own_gpu_only=True)
        if self.distributed:
            inside = self._ranks[""][0]
        first = self._run(change, what, inside)
        if isinstance(first, ScriptEnd):
            return first
        shares = first.first.shares
        numbers = ranks_that_may_need_most(shares, job.nproc) if shares else (inside.rank,)
        missing = tuple(replace(inside, rank=number) for number in numbers if number != inside.rank)
        found = self._run_all(change, what, missing)
        if isinstance(found, ScriptEnd):
            return found
        largest = max([first] * (inside.rank in numbers) + found, key=_process)
        self._ranks[sharding] = (largest.rank,)
        return [largest]

    def _run_all(self, change: Change, what: str, ranks: tuple[Rank, ...]) -> list[RankRun] | ScriptEnd:
        found = []
        for rank in ranks:
            run = self._run(change, what, rank)
            if isinstance(run, ScriptEnd):
                if len(ranks) == 1:
                    return run
                return ScriptEnd("refused", run.exit_code, f"as {rank}, {why_run_failed(run)}")
            found.append(run)
        return found

    def _completed(self, change: Change, what: str, rank: Rank) -> RankRun:
        found = self._run(change, what, rank)
        if isinstance(found, ScriptEnd):
            raise UnfinishedRankError(rank, found)
        return found

    def _run(self, change: Change, what: str, rank: Rank) -> RankRun | ScriptEnd:
        """Run the script as one rank, and again where streams race, unless all work is late anyway."""
        first, again = self._once(change, what, rank), None
        if isinstance(first, ScriptEnd):
            return first
        if not change.finish_late and may_side_streams_change_peak(first.trace):
            again = self._once(replace(change, finish_late=True), what, rank)
        return again if isinstance(again, ScriptEnd) else RankRun(rank, first, again)

    def _once(self, change: Change, what: str, rank: Rank) -> TrialResult | ScriptEnd:
        options = replace(self._options, rank=rank, unlimited=True)
        if rank.rank not in self._standbys:
            self._standbys[rank.rank] = ScriptStandbys().__enter__()
        several = rank.world_size > 1

        def show(now: ScriptProgress) -> None:
            self._on_progress(replace(now, rank=str(rank) if several else ""))

        standbys = self._standbys[rank.rank]
        return trial_runner(self._command, options, show, standbys=standbys)(change, what)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for standbys in self._standbys.values():
            standbys.__exit__()


def _process(run: RankRun) -> int:
    return dry_run_of_trace(run.results[-1].trace).peak_process.bytes


def _held(run: RankRun) -> _RankMemory:
    found, nccl = dry_run_of_trace(run.first.trace), run.first.trace.device.nccl
    return _RankMemory(
        found.peak_allocated, found.peak_reserved, found.peak_place, 0 if nccl is None else nccl.bytes
    )


def _sharding_mode(change: Change) -> str:
    """Return the mode of the sharding in a change; empty without one.

    >>> _sharding_mode(Change({"sharding": {"mode": "zero1"}}))
    'zero1'
    """
    return str(change.plan.get("sharding", {}).get("mode", ""))
