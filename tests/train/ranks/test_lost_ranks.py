"""Ranks that ended without a report: which errors mean that, and which rank it was."""

import os
from pathlib import Path

import pytest
import torch

from memfit.train.ranks import lost_ranks, rank_agreement
from memfit.train.ranks.lost_ranks import RankProcesses, is_broken_connection


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo pair.cc:561] Connection closed by peer [127.0.0.1]:11690."),
        RuntimeError("[gloo pair.cc:545] Read error [127.0.0.1]:5541: Connection reset by peer"),
        RuntimeError("[gloo unbound_buffer.cc:84] Timed out waiting 60000ms for recv operation"),
        torch.distributed.DistBackendError("NCCL error: remote process exited or there was a network error"),
    ],
)
def test_the_errors_of_gloo_and_nccl_mean_that_a_rank_is_lost(error):
    assert is_broken_connection(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ConnectionResetError("of a loader")],
)
def test_other_errors_do_not(error):
    assert not is_broken_connection(error)


def free_process_id():
    return next(pid for pid in range(4_000_000, 1_000, -1) if not Path(f"/proc/{pid}").exists())


def test_the_rank_whose_process_has_ended_is_named():
    here, gone = lost_ranks._machine(), free_process_id()
    processes = RankProcesses(((here, os.getpid()), (here, gone), ("another", gone)))
    assert processes.ended() == [1]
    assert processes.describe([1]) == f"Rank 1 (process {gone}) has ended without reporting an error."
    both = f"Rank 1 (process {gone}) and rank 2 (process {gone}) have ended without reporting an error."
    assert processes.describe([1, 2]) == both


def test_a_rank_of_another_machine_is_not_named(monkeypatch):
    monkeypatch.setattr(lost_ranks, "_SECONDS", 0.0)
    processes = RankProcesses(((lost_ranks._machine(), os.getpid()), ("another", free_process_id())))
    assert processes.ended() == []
    assert "on another machine" in processes.describe([])


def test_the_group_of_an_engine_is_released_at_exit_if_the_script_has_destroyed_it(monkeypatch):
    """A thread of Gloo that still runs when the interpreter ends may abort the process."""
    at_exit = []
    monkeypatch.setattr(rank_agreement.atexit, "register", lambda *call: at_exit.append(call))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ours = rank_agreement.JobRanks()
        ((release, reference),) = at_exit
        release(reference)
        assert ours.control is not None
    finally:
        torch.distributed.destroy_process_group()
    release(reference)
    assert ours.control is None
