"""memfit's allocator equals PyTorch's own on the ghost: every address and statistic, at every operation."""

import importlib.util
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support import warm_process

pytestmark = pytest.mark.process

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "allocator_differential.py"
OPERATIONS = 50_000
SEED = 20261122  # the benchmark takes a fresh one at each run


@pytest.fixture(scope="module")
def differential():
    spec = importlib.util.spec_from_file_location("allocator_differential", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(900)
def test_nothing_differs_under_any_setting(differential):
    situations = differential.situations(random.Random(SEED))  # noqa: S311
    each = -(-OPERATIONS // len(situations))

    def run(situation):
        conf, options = situation
        settings = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), conf)
        done = warm_process.on_ghost(
            differential.DRIVER, json.dumps(options | {"operations": each}), **settings
        )
        return conf, differential.result_of(done)

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        done = list(workers.map(run, situations))
    assert {conf: result["mismatch"] for conf, result in done if result["mismatch"]} == {}
    assert sum(result["operations"] for _, result in done) >= OPERATIONS
    # Each of these must happen somewhere, or the comparison did not cover it.
    assert sum(result["retries"] for _, result in done)
    assert sum(result["outs_of_memory"] for _, result in done)
