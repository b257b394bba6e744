"""Mutants of the allocator are caught: all in Python by two situations, and some in C.

With MEMFIT_TIMES=2, each mutant, in C too, must be caught by any situation of test_differential.py, by the
referee, or by the comparison of the allocator in C with the reference: it takes ten minutes.
"""

import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys

import pytest

from support.allocator_comparison.compiled import replay_compiled
from support.allocator_comparison.model import Log, Model
from support.allocator_comparison.mutants import mutants, mutated, mutated_c
from support.allocator_comparison.situations import DRIVER, situations
from support.allocator_comparison.twins import TWIN_CONFS, compare
from support.allocator_comparison.watched import CONFS, run
from support.reference_allocator import caching_allocator

pytestmark = [pytest.mark.process, pytest.mark.slow]

ALL = int(os.environ.get("MEMFIT_TIMES", "1")) > 1
LONGEST = 60  # seconds of one attempt of a mutant in C
GIB = 1 << 30
SITUATIONS = {
    "expandable_segments:True,max_split_size_mb:64": {"streams": 3, "share": 0.2, "pools": 1},
    "max_split_size_mb:64,garbage_collection_threshold:0.6,roundup_power2_divisions:[1:2,8:4,64:8,>:2]": {
        "fraction": 0.75,
        "streams": 3,
        "share": 0.2,
    },
}
# The two situations above do not expose these mutants; those of test_differential.py do.
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
    chosen = [
        (conf, {"operations": 1500, "seed": 3, "total": 2 * GIB} | more) for conf, more in SITUATIONS.items()
    ]
    if ALL:
        chosen += [(conf, more | {"operations": 800}) for conf, more in situations(random.Random(0))]  # noqa: S311
    for number, (conf, options) in enumerate(chosen):
        log = folder / f"{number}.npz"
        command = [sys.executable, str(DRIVER), json.dumps(options | {"log": str(log)})]
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


def in_child(attempt, *arguments):
    """Make an attempt in a fork, because mutated C may crash or never return."""
    process = multiprocessing.get_context("fork").Process(target=attempt, args=arguments)
    process.start()
    process.join(LONGEST)
    if process.is_alive():
        process.kill()
        process.join()
    if process.exitcode:
        raise RuntimeError(f"exit code {process.exitcode}")


def is_caught(mutant, logs):
    """Return whether any way catches a mutant."""
    if mutant.compiled:
        with mutated_c(mutant):
            twins = ((compare, conf, seed) for seed in range(4) for conf in TWIN_CONFS)
            ways = ((in_child, *way) for way in (*((replay_compiled, log) for log in logs), *twins))
            return any(caught(*way) for way in ways)
    with mutated(mutant) as changed:
        referee = ((run, conf, seed, 250, changed) for seed in range(4) for conf in CONFS)
        replays = ((log.replay, Model(log.situation, changed)) for log in logs)
        return any(caught(*way) for way in itertools.chain(replays, referee))


@pytest.mark.skipif(not ALL, reason="MEMFIT_TIMES=2 asks for all mutants")
@pytest.mark.timeout(3600)
def test_every_mutant_is_caught_unless_it_changes_nothing(logs):
    assert {mutant.what for mutant in LISTED if not is_caught(mutant, logs)} == set(EQUAL)


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


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"module": "caching_allocator", "line": "no such line"}, "occurs 0 times in caching"),
        ({"module": "no_such_module"}, "no module 'no_such_module'"),
    ],
)
def test_a_mutant_of_a_missing_line_or_module_is_refused(change, refusal):
    with pytest.raises(ValueError, match=refusal), mutated(LISTED[0]._replace(**change)):
        pass
