"""The engine on several gloo ranks against one process with all data: random jobs, and LeNet-5 on digits.

Each job draws the numbers of samples, the micro-batch size, a loss that is a mean or a sum with its number
of tokens, and whether gradients are clipped; it makes three updates with SGD. The difference is the largest
of any gradient, parameter or loss on any rank. Memory: in each job, one or both ranks cannot hold more than
two samples at a time, in forward or in backward.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rank_tables.row import Row

import memfit

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support import failure_rank_cases, rank_cases
from support.rank_pool import RankPool

COLUMNS = ("job", "ranks", "jobs", "largest difference", "limit")
JOBS = 20
LIMITS = {"float32": 1e-6, "float64": 1e-12}
MODES = ("ddp", "zero1", "fsdp2")


def rows() -> Iterator[Row]:
    """Run the jobs of each mode on two and on four ranks."""
    for ranks in (2, 4):
        pool = RankPool(ranks)
        try:
            for mode in MODES:
                for dtype, limit in LIMITS.items():
                    draw = random.Random(f"{ranks} {mode} {dtype}")  # noqa: S311 - not for secrets
                    worst = max(_random_job(pool, mode, dtype, draw) for _ in range(JOBS))
                    yield _row(f"{mode}, {dtype}", ranks, JOBS, worst, limit)
            if ranks == 2:  # noqa: PLR2004 - two processes with three micro-batches each
                yield _lenet(pool, "float32", 8)
                yield _lenet(pool, "float64", 29)
            for mode in ("ddp", "zero1"):
                draw = random.Random(f"{ranks} {mode}")  # noqa: S311 - not for secrets
                worst = max(_job_out_of_memory(pool, mode, draw) for _ in range(JOBS))
                yield _row(f"{mode}, out of memory", ranks, JOBS, worst, LIMITS["float32"])
        finally:
            pool.close()


def _row(name: str, ranks: int, jobs: int, worst: float, limit: float) -> Row:
    return Row(
        (name, f"{ranks}", f"{jobs}", f"{worst:.1e}", f"{limit:.0e}"),
        "" if worst <= limit else "more than the limit",
    )


def _random_job(pool: Any, mode: str, dtype: str, draw: random.Random) -> float:
    sizes = [[draw.randint(1, 6) for _ in range(pool.ranks)] for _ in range(3)]
    loss = draw.choice(("mean_loss", "token_loss"))
    options = draw.choice(({}, {"max_grad_norm": 0.5}))
    plan = [memfit.Sharding(mode), memfit.Accumulation(micro_batch_size=draw.randint(1, 4))]
    found = pool.run("steps", plan, sizes, dtype, loss, options)
    return difference(found, rank_cases.steps(0, 1, None, sizes, dtype, loss, options))


def _job_out_of_memory(pool: Any, mode: str, draw: random.Random) -> float:
    sizes = [[draw.randint(1, 7) for _ in range(pool.ranks)] for _ in range(3)]
    failing = draw.sample(range(pool.ranks), draw.randint(1, pool.ranks))
    found = pool.run("out_of_memory", mode, failing, sizes, module="support.failure_rank_cases")
    return difference(found, failure_rank_cases.out_of_memory(0, 1, mode, [], sizes))


def _lenet(pool: Any, dtype: str, updates: int) -> Row:
    """Compare gradients and parameters of all updates; SGD magnifies their rounding with each."""
    worst = difference(pool.run("lenet", dtype, updates), rank_cases.lenet(0, 1, dtype, updates))
    name = f"LeNet-5, {dtype}, 2 x 3 micro-batches as 1 x 6, {updates} updates"
    return _row(name, 2, 1, worst, LIMITS[dtype])


def difference(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> float:
    """Return the largest difference of any rank from one process: gradients, parameters and losses."""
    worst = 0.0
    for rank in ranks:
        pairs = [(rank["parameters"], alone["parameters"])]
        pairs += zip(rank["gradients"], alone["gradients"], strict=True)
        for mine, theirs in pairs:
            worst = max(worst, *((mine[name] - theirs[name]).abs().max().item() for name in theirs))
        losses = zip(rank["losses"], alone["losses"], strict=True)
        worst = max(worst, *(abs(mine - theirs) for mine, theirs in losses))
    return worst
