"""Two and four gloo ranks against one process that trains on the concatenated data."""

import pytest

import memfit
from support import rank_cases
from support.rank_pool import RankPool

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
pytestmark = pytest.mark.process


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def pool(request):
    pool = RankPool(request.param)
    yield pool
    pool.close()


def assert_alike(ranks, alone, dtype):
    for rank in ranks:
        for mine, theirs in [
            (rank["parameters"], alone["parameters"]),
            *zip(rank["gradients"], alone["gradients"], strict=True),
        ]:
            assert mine.keys() == theirs.keys()
            for name in mine:
                assert (mine[name] - theirs[name]).abs().max() <= TOLERANCE[dtype], name
        assert rank["losses"] == pytest.approx(alone["losses"], abs=TOLERANCE[dtype])
        assert rank["norms"] == pytest.approx(alone["norms"], abs=TOLERANCE[dtype])
        assert rank["losses"] == ranks[0]["losses"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("loss", ["mean_loss", "token_loss"])
@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp2"])
def test_ranks_train_as_one_process(pool, mode, loss, dtype):
    sizes = [[3, 5, 2, 4][: pool.ranks]] * 3
    plan = [memfit.Sharding(mode), memfit.Accumulation(micro_batch_size=2)]
    options = {"max_grad_norm": 0.5}  # clips each update
    ranks = pool.run("support.rank_cases", "steps", plan, sizes, dtype, loss, options)
    alone = rank_cases.steps(0, 1, None, sizes, dtype, loss, options)
    assert min(alone["norms"]) > 0.5
    assert_alike(ranks, alone, dtype)
