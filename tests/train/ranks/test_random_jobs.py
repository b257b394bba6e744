"""Random jobs on several ranks equal one process with all data.

MEMFIT_TIMES=10 draws ten times the jobs. Each job draws the numbers of samples, the micro-batch size, a loss
that is a mean or a sum with its number of tokens, and whether gradients are clipped; it makes three updates
with SGD. Compared is the largest difference of any gradient, parameter or loss on any rank.
"""

import os
import random

import pytest

import memfit
from support import failure_rank_cases, rank_cases

pytestmark = [pytest.mark.process, pytest.mark.slow]

JOBS = 2 * int(os.environ.get("MEMFIT_TIMES", "1"))
LIMITS = {"float32": 1e-6, "float64": 1e-12}


def difference(ranks, alone):
    """Return the largest difference of any rank from one process."""
    worst = 0.0
    for rank in ranks:
        pairs = [(rank["parameters"], alone["parameters"])]
        pairs += zip(rank["gradients"], alone["gradients"], strict=True)
        for mine, theirs in pairs:
            worst = max(worst, *((mine[name] - theirs[name]).abs().max().item() for name in theirs))
        losses = zip(rank["losses"], alone["losses"], strict=True)
        worst = max(worst, *(abs(mine - theirs) for mine, theirs in losses))
    return worst


@pytest.fixture(params=["two_ranks", "four_ranks"])
def pool(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("mode", ["ddp", "zero1", "fsdp2"])
def test_random_jobs_equal_one_process(pool, mode, dtype):
    draw = random.Random(f"{pool.ranks} {mode} {dtype}")  # noqa: S311 - not for secrets
    for _ in range(JOBS):
        sizes = [[draw.randint(1, 6) for _ in range(pool.ranks)] for _ in range(3)]
        loss = draw.choice(("mean_loss", "token_loss"))
        options = draw.choice(({}, {"max_grad_norm": 0.5}))
        plan = [memfit.Sharding(mode), memfit.Accumulation(micro_batch_size=draw.randint(1, 4))]
        found = pool.run("steps", plan, sizes, dtype, loss, options)
        alone = rank_cases.steps(0, 1, None, sizes, dtype, loss, options)
        assert difference(found, alone) <= LIMITS[dtype]


@pytest.mark.parametrize("mode", ["ddp", "zero1"])
def test_random_jobs_in_which_ranks_run_out_of_memory_equal_one_process(pool, mode):
    """One rank or more cannot hold more than two samples at a time, in forward or in backward."""
    draw = random.Random(f"{pool.ranks} {mode}")  # noqa: S311 - not for secrets
    for _ in range(JOBS):
        sizes = [[draw.randint(1, 7) for _ in range(pool.ranks)] for _ in range(3)]
        failing = draw.sample(range(pool.ranks), draw.randint(1, pool.ranks))
        found = pool.run("out_of_memory", mode, failing, sizes, module="support.failure_rank_cases")
        alone = failure_rank_cases.out_of_memory(0, 1, mode, [], sizes)
        assert difference(found, alone) <= LIMITS["float32"]
