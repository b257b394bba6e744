"""A rank that runs out of memory or fails otherwise: all ranks try again, or all end with its report."""

import pytest

from support import failure_rank_cases, rank_pool

CASES = "support.failure_rank_cases"


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
@pytest.mark.parametrize("failing", [[1], [0, 1]])
@pytest.mark.parametrize("size", [5, 4], ids=["in forward", "in backward"])
def test_row_28_all_ranks_repeat_a_step_in_which_one_ran_out_of_memory(two_ranks, mode, failing, size):
    sizes = [[2, 2], [4, size], [3, size]]
    ranks = two_ranks.run("out_of_memory", mode, failing, sizes, module=CASES)
    alone = failure_rank_cases.out_of_memory(0, 1, mode, [], sizes)
    for rank in ranks:
        assert [retried for *_, retried in rank["steps"]] == [0, 2 if size == 5 else 1, 0]
        for name, parameter in rank["parameters"].items():
            assert (parameter - alone["parameters"][name]).abs().max() <= 1e-6, name
        assert rank["losses"] == ranks[0]["losses"] == pytest.approx(alone["losses"], abs=1e-6)


@pytest.mark.parametrize("failing", [[1], [0, 1]])
@pytest.mark.parametrize("protect", ["always", "auto"])
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_all_ranks_undo_an_update_in_which_one_ran_out_of_memory(two_ranks, mode, protect, failing):
    """With ``auto``, one rank's allocator is short of memory, and all copy what they are to restore."""
    ranks = two_ranks.run("interrupted_update", mode, failing, {"protect": protect}, module=CASES)
    alone = failure_rank_cases.interrupted_update(0, 1, mode, [], {})
    for number, rank in enumerate(ranks):
        assert rank["error"] == ("OutOfMemoryError" if number in failing else "RankFailedError")
        assert rank["restored"]
        for name, parameter in rank["parameters"].items():
            assert (parameter - alone["parameters"][name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize(
    ("where", "kind", "says"),
    [
        ("forward", "ValueError", "Rank 1 failed in forward (failure_rank_cases.py:"),
        ("backward", "OutOfMemoryError", "Rank 1 failed in backward"),
        ("update", "OutOfMemoryError", "Rank 1 failed in update (failure_rank_cases.py:"),
    ],
)
@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_the_other_ranks_end_with_the_report_of_the_one_that_failed(two_ranks, mode, where, kind, says):
    other, failed = two_ranks.run("failing", mode, where, module=CASES)
    assert (failed[0], other[0]) == (kind, "RankFailedError")
    assert says in other[1]
    assert failed[1].splitlines()[0] in other[1]
    assert failed[2]  # parameters are those of the last update, on both
    assert other[2]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("batch", "error", "says"),
    [("empty", "UsageError", "has no samples"), ("ambiguous", "AmbiguousBatchError", "is ambiguous")],
)
def test_all_ranks_learn_at_once_that_one_cannot_divide_its_batch(two_ranks, mode, batch, error, says):
    other, failed = two_ranks.run("failing_to_prepare", mode, batch, module=CASES)
    assert (failed[0], other[0]) == (error, "RankFailedError")
    assert says in failed[1]
    assert other[1].startswith("Rank 1 failed in preparation")
    assert failed[1].splitlines()[0] in other[1]
    assert failed[2] == other[2] == 2


def test_ranks_wait_for_each_other_as_long_as_the_job_does(two_ranks):
    assert two_ranks.run("seconds_until_lost", module=CASES) == [rank_pool.SECONDS] * 2
