"""``memfit.ChunkedHead`` on two gloo ranks: gradients are those of one process, reduced once."""

import pytest


@pytest.mark.slow
def test_data_parallel_and_sharded_models_have_the_gradients_of_one_process(two_ranks):
    for found, refused in two_ranks.run("compared", module="support.chunked_head_rank_cases"):
        assert [*refused] == ["fsdp2 of the head", "ddp of the head", "fsdp2, outside"]
        assert all("is wrapped or sharded itself" in message for message in refused.values())
        assert len(found) == 4
        assert max(found.values()) <= 1e-15, found
