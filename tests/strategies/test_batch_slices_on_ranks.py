"""Batch slices on two gloo ranks: gradients are those of one process, and each bucket is reduced once."""

import pytest


@pytest.mark.slow
def test_gradients_of_ranks_equal_those_of_the_whole_batch(two_ranks):
    for found, reductions, refused in two_ranks.run("compared", module="support.slice_rank_cases"):
        assert len(found) == 10
        assert max(found.values()) <= 1e-15, found
        assert [*refused] == ["fsdp2, loss"]
        assert "FSDP shards its parameters" in refused["fsdp2, loss"]
        assert len(reductions.pop("fsdp2, loss")) == 1
        for case, (plain, sliced) in reductions.items():
            assert plain == sliced, case
        assert reductions["ddp, small buckets"][1] == reductions["ddp, small buckets, loss"][1] == [*range(5)]
