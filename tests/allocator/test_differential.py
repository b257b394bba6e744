"""memfit's allocator equals PyTorch's own on the ghost: every address and statistic, at every operation.

MEMFIT_TIMES=100 makes so many times the operations, and MEMFIT_SEED=N others.
"""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from support import warm_process
from support.allocator_comparison.situations import DRIVER, SETTINGS, result_of, situations

pytestmark = pytest.mark.process

TIMES = int(os.environ.get("MEMFIT_TIMES", "1"))
OPERATIONS = 50_000 * TIMES
ALONE = 1 + sum(map(len, SETTINGS.values()))  # situations without pairs of settings
SEED = int(os.environ.get("MEMFIT_SEED", "20261122"))


@pytest.mark.timeout(900 * TIMES)
@pytest.mark.parametrize(
    ("situations_tried", "operations"),
    [(ALONE, OPERATIONS // 3), pytest.param(None, OPERATIONS, marks=pytest.mark.slow)],
    ids=["alone", "and in pairs"],
)
def test_nothing_differs_under_any_setting(situations_tried, operations):
    chosen = situations(random.Random(SEED))[:situations_tried]  # noqa: S311
    each = -(-operations // len(chosen))

    def run(situation):
        conf, options = situation
        settings = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), conf)
        done = warm_process.on_ghost(DRIVER, json.dumps(options | {"operations": each}), **settings)
        return conf, result_of(done)

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        done = list(workers.map(run, chosen))
    assert {conf: result["mismatch"] for conf, result in done if result["mismatch"]} == {}
    assert sum(result["operations"] for _, result in done) >= operations
    # Each of these must happen somewhere, or the comparison did not cover it.
    assert sum(result["retries"] for _, result in done)
    assert sum(result["outs_of_memory"] for _, result in done)
