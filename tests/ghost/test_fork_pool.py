"""The fork pool: every job runs in a fork of its own, with the same figures as a separate process."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.devices import find_device
from memfit.errors import TargetError
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice
from support.fork_pool import ForkPool, PoolJob

pytestmark = pytest.mark.process

TARGETS = str(Path(__file__).with_name("fork_pool_targets.py"))
GIB = 1 << 30


def target(name):
    return f"{TARGETS}:{name}"


@pytest.fixture(scope="module")
def device():
    return GhostDevice.of(find_device("A100-80GB"))


@pytest.fixture(scope="module")
def pool(device):
    with ForkPool(build_ghost(), device) as pool:
        yield pool


@pytest.mark.slow
def test_peaks_equal_those_of_a_separate_process(pool, device):
    code = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from memfit.devices import find_device
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice
from memfit.ghost.load_ghost import load
load(build_ghost()).configure(GhostDevice.of(find_device("A100-80GB")))
import fork_pool_targets
print(json.dumps(fork_pool_targets.gpt2_small(batch=2)))
sys.stdout.flush()
import os; os._exit(0)
"""
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    expected = json.loads(alone.stdout)
    results = pool.map([PoolJob(target("gpt2_small"), {"batch": 2})] * 3)
    assert results == [expected] * 3


def test_each_job_runs_in_its_own_process(pool):
    assert len(set(pool.map([PoolJob(target("process"))] * 4))) == 4


def test_a_job_can_set_its_device_and_environment(pool, device):
    small = replace(device, total_bytes=4 * GIB, name="a smaller one")
    assert pool.run(PoolJob(target("one_tensor"), {"size": 5 * GIB})) == 5 * GIB
    assert pool.run(PoolJob(target("one_tensor"), {"size": 5 * GIB}, device=small)) is None
    assert pool.run(PoolJob(target("one_tensor"), {"size": 3 * GIB}, device=small)) == 3 * GIB
    assert pool.run(PoolJob(target("one_tensor"), {"size": 3 * GIB}, device=small, in_use=2 * GIB)) is None
    expandable = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    found = pool.run(PoolJob(target("settings"), device=small, environment=expandable))
    assert found == {"expandable": True, "device": "a smaller one"}
    assert pool.run(PoolJob(target("settings")))["expandable"] is False


def test_a_failed_job_raises_with_its_traceback_and_the_pool_continues(pool):
    with pytest.raises(TargetError, match=r"fails failed: ValueError: this one cannot work[\s\S]*line \d+"):
        pool.run(PoolJob(target("fails")))
    with pytest.raises(TargetError, match="died without returning a result"):
        pool.run(PoolJob(target("dies")))
    assert pool.run(PoolJob(target("one_tensor"), {"size": 512})) == 512
