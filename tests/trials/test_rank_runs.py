"""Which ranks of a job run, with runs that are computed instead of made."""

from dataclasses import replace

import pytest

from memfit.analysis.trial_result import TrialResult
from memfit.records import Action, Change, DeviceUse, Figure, Provenance, ScriptEnd
from memfit.run.job_rank import Rank
from memfit.run.options import RunOptions
from memfit.trials import rank_runs
from memfit.trials.rank_runs import RankRuns, UnfinishedRankError
from support.traces import BASE, trace_of

MIB = 1 << 20
DEVICE = DeviceUse("A100-80GB", Figure(1 << 40, Provenance.EXACT), Figure(100 * MIB, Provenance.EXACT), 0)
CHECKPOINTED = Change({"checkpointing": {}})
SHARDED = Change({"sharding": {"mode": "ddp"}})


def result(mebibytes, nccl=0, *, races=False):
    history = [(Action.SEGMENT_ALLOC, BASE, mebibytes * MIB), (Action.ALLOC, BASE, mebibytes * MIB)]
    used = Figure(nccl * MIB, Provenance.ASSUMED) if nccl else None
    return TrialResult(trace_of(history, device=replace(DEVICE, nccl=used, race=races)))


@pytest.fixture
def job(monkeypatch):
    """Return a function that makes a job's runs, given the result for each rank; ``ran`` lists the runs."""
    ran = []

    def make(results, nproc=4, nnodes=1):
        def trial_runner(_command, options, *_, **__):
            def run(change, _what):
                ran.append((options.rank.rank, change.finish_late))
                return results(options.rank.rank)

            return run

        monkeypatch.setattr(rank_runs, "trial_runner", trial_runner)
        return RankRuns(("t.py",), RunOptions(rank=Rank(nproc=nproc, nnodes=nnodes)), lambda _: None)

    make.ran = ran
    return make


def ranks(runs):
    return [run.rank.rank for run in runs]


def test_one_rank_of_each_role_runs_that_which_needs_most_first(job):
    with job(lambda rank: result(300 if rank == 2 else 200, nccl=30 if rank in (1, 2) else 20)) as runs:
        assert ranks(runs.as_written(Change(), "as written")) == [2, 1]
        assert (runs.distributed, runs.count) == (True, 4)
        assert ranks(runs.under(CHECKPOINTED, "checkpointing")) == [2, 1]
        runs.keep_largest(Rank(rank=2, nproc=4))
        assert ranks(runs.under(CHECKPOINTED, "checkpointing")) == [2]
    assert [rank for rank, _ in job.ran] == [0, 1, 2, 3, 2, 1, 2]


def test_of_many_machines_few_ranks_run(job):
    with job(lambda rank: result(300 if rank < 2 else 200, nccl=20), nproc=2, nnodes=64) as runs:
        assert ranks(runs.as_written(Change(), "as written")) == [0, 126]
        assert runs.count == len(job.ran) < 20


def test_a_script_for_one_gpu_sees_its_own_gpu_alone_once_it_is_sharded(job):
    with job(lambda _: result(200)) as runs:
        assert runs.as_written(Change(), "as written")[0].rank == Rank(nproc=4)
        (run,) = runs.under(SHARDED, "DDP")
        assert run.rank == Rank(rank=1, nproc=4, own_gpu_only=True)
        assert ranks(runs.under(CHECKPOINTED, "checkpointing")) == [0]


def test_a_rank_that_does_not_complete_is_named(job):
    end = ScriptEnd("exception", 1, "ValueError: no")
    with job(lambda rank: end if rank == 3 else result(200, nccl=20)) as runs:
        with pytest.raises(UnfinishedRankError) as failed:
            runs.as_written(Change(), "as written")
        assert (failed.value.rank.rank, failed.value.end) == (3, end)


def test_where_streams_race_a_second_run_finishes_late(job):
    with job(lambda _: result(200, races=True), nproc=1) as runs:
        (run,) = runs.as_written(Change(), "as written")
        assert run.late is not None
        (run,) = runs.under(replace(CHECKPOINTED, finish_late=True), "checkpointing")
        assert run.late is None
    assert job.ran == [(0, False), (0, True), (0, True)]


def test_a_rank_that_a_change_does_not_suit_is_named(job):
    refused = {}
    with job(lambda rank: refused.get(rank) or result(200 + rank, nccl=20), nproc=2) as runs:
        runs.as_written(Change(), "as written")
        refused[0] = ScriptEnd("refused", 0, "no module")
        assert runs.under(CHECKPOINTED, "checkpointing").exception == "as rank 0 of 2, no module"
