"""Mutants of the allocator are caught: a sample of those in benchmarks/allocator_mutations.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiled import replay_compiled
from model import Log, Model
from mutants import mutants, mutated, mutated_c
from watched import CONFS, run

from support.reference_allocator import caching_allocator

pytestmark = [pytest.mark.process, pytest.mark.slow]

DRIVER = Path(__file__).parents[2] / "benchmarks" / "allocator" / "drive.py"
GIB = 1 << 30
SITUATIONS = {
    "expandable_segments:True,max_split_size_mb:64": {"streams": 3, "share": 0.2, "pools": 1},
    "max_split_size_mb:64,garbage_collection_threshold:0.6,roundup_power2_divisions:[1:2,8:4,64:8,>:2]": {
        "fraction": 0.75,
        "streams": 3,
        "share": 0.2,
    },
}
# The two situations above do not expose these mutants; others of the benchmark do.
ELSEWHERE = {
    "a single division rounds up",
    "max_split_size does not prevent splitting",
    "a request of exactly max_split_size splits blocks",
    "a block of exactly max_split_size is not oversize",
    "max_non_split_rounding is exclusive",
    "handles of the large pool are always 20 MiB",
    "the memory fraction is compared with the request, not the segment",
    "reaching the memory fraction exactly is refused",
    "throw_on_cudamalloc_oom is ignored",
    "throw_on_cudamalloc_oom looks at the request, not the segment",
    "no oversize block is released",
    "oversize blocks are released from the smallest up",
    "releasing one oversize block is enough",
    "garbage is collected without a fraction",
    "a private pool's memory is never released",
}
LISTED, EQUAL = mutants()
BY_NAME = {mutant.what: mutant for mutant in LISTED}


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Return the logs of PyTorch's real allocator, one for each situation."""
    folder = tmp_path_factory.mktemp("logs")
    found = []
    for number, (conf, options) in enumerate(SITUATIONS.items()):
        log = folder / f"{number}.npz"
        command = [
            sys.executable,
            str(DRIVER),
            json.dumps({"operations": 1500, "seed": 3, "total": 2 * GIB, "log": str(log)} | options),
        ]
        environment = {**os.environ, "PYTORCH_ALLOC_CONF": conf}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["mismatch"] == ""
        found.append(Log.read(log))
    return found


def caught(attempt, *arguments):
    try:
        attempt(*arguments)
    except Exception:  # noqa: BLE001 - a mutant may raise anything, such as KeyError
        return True
    return False


def test_the_unchanged_allocator_replays_the_logs(logs):
    for log in logs:
        log.replay(Model(log.situation))
        replay_compiled(log)


def test_the_comparison_with_pytorch_catches_each_mutant(logs):
    escaped = set()
    for mutant in LISTED:
        if mutant.compiled:
            continue
        with mutated(mutant) as changed:
            if not any(caught(log.replay, Model(log.situation, changed)) for log in logs):
                escaped.add(mutant.what)
    assert escaped <= set(EQUAL) | ELSEWHERE


@pytest.mark.parametrize(
    "what",
    [
        "a 1 MiB request uses the large pool",
        "ties are broken by address alone",
        "a block waiting for events stays active",
    ],
)
def test_the_comparison_with_pytorch_catches_compiled_mutants(logs, what):
    with mutated_c(BY_NAME[f"compiled: {what}"]):
        assert any(caught(replay_compiled, log) for log in logs)
    replay_compiled(logs[0])


@pytest.mark.parametrize(
    "what",
    [
        "no merge with the next",
        "max_split_size does not prevent splitting",
        "a partly used first handle is unmapped",
        "only the large pool is released",
        "a private pool's memory is never released",
        "the first completed event frees the block",
    ],
)
def test_the_referee_catches_mutants(what):
    with mutated(BY_NAME[what]) as changed:
        assert any(caught(run, conf, seed, 250, changed) for seed in range(6) for conf in CONFS)


def test_mutants_leave_the_real_allocator_unchanged():
    with mutated(LISTED[0]) as changed:
        assert changed is not caching_allocator
    assert sys.modules[caching_allocator.__name__] is caching_allocator
    run(CONFS[0], 0, 250)


def test_a_mutant_of_a_missing_line_is_refused():
    with (
        pytest.raises(ValueError, match=r"occurs 0 times in caching"),
        mutated(LISTED[0]._replace(module="caching_allocator", line="no such line")),
    ):
        pass
