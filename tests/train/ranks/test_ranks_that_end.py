"""Ranks whose processes end: after these tests, the pool has to be started anew."""

import pytest


@pytest.mark.parametrize(
    ("mode", "where", "says"),
    [
        ("fsdp2", "forward", "Rank 1 failed in forward (rank_cases.py:"),
        ("zero1", "update", "Rank 1 failed in update (rank_cases.py:"),
    ],
)
def test_ranks_inside_a_collective_operation_end_with_the_report_of_the_one_that_ended(
    two_ranks, mode, where, says
):
    kind, message, _ = two_ranks.run("failing", mode, where, True, ends=[1])[0]
    assert kind == "RankFailedError"
    assert says in message
