"""Ranks whose processes end: after these tests, the pool has to be started anew."""

import pytest

CASES = "support.failure_rank_cases"


def test_ranks_inside_a_collective_operation_end_with_the_report_of_the_one_that_ended(two_ranks):
    kind, message, _ = two_ranks.run("failing", "fsdp2", "forward", True, module=CASES, ends=[1])[0]
    assert kind == "RankFailedError"
    assert "Rank 1 failed in forward (failure_rank_cases.py:" in message


@pytest.mark.slow
def test_a_rank_that_cannot_create_its_engine_is_what_the_others_report(two_ranks):
    kind, message = two_ranks.run("failing_to_begin", module=CASES, ends=[1])[0]
    assert kind == "RankFailedError"
    assert "Rank 1 failed in memfit.Engine (failure_rank_cases.py:" in message
    assert "ValueError: no learning rate" in message


def test_a_rank_that_cannot_load_its_data_is_what_the_others_report(two_ranks):
    kind, message = two_ranks.run("failing_data", "ddp", module=CASES, ends=[1])[0]
    assert kind == "RankFailedError"
    assert "Rank 1 failed in fit (failure_rank_cases.py:" in message
    assert "ValueError: a file is missing" in message
