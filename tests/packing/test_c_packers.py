"""The compiled packers: compared with a naive one, under sanitizers, cancelled, interrupted."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from memfit.packing import c_packers
from memfit.packing.buffer_lifetimes import Buffers, lifetime_sections
from support.known_packings import gapless_problem
from support.sanitized_build import run_check

CHECK = Path(__file__).with_name("check_packers.c")


@pytest.mark.process
def test_random_problems_are_packed_under_sanitizers(tmp_path):
    folder = c_packers.LIBRARY.sources
    sources = [CHECK, *sorted(folder.glob("*.c"))]
    output = run_check(tmp_path / "check", sources, f"-I{folder}", arguments=("0", "400"))
    assert all(int(count) for count in re.findall(r"\d+", output)), output  # each outcome occurred


def naive(problem, order, *, tightest):
    """Place buffers one after the other by trying every possible offset."""
    offsets = {}
    for index in order:
        life = moments(problem, index)
        overlapping = [
            (offset, offset + int(problem.size[other]))
            for other, offset in offsets.items()
            if life & moments(problem, other)
        ]
        gaps = []
        for at in sorted({0, *(end for _, end in overlapping)}):
            above = min((begin for begin, end in overlapping if end > at), default=None)
            gap = float("inf") if above is None else above - at
            if gap >= problem.size[index]:
                gaps.append((gap, at) if tightest else (at, at))
        offsets[index] = min(gaps)[1]
    return [offsets[index] for index in range(len(problem))]


def moments(problem, index):
    times = range(problem.lower[index], problem.upper[index])
    return {time % problem.period if problem.period else time for time in times}


@pytest.mark.parametrize("is_circle", [False, True])
@pytest.mark.parametrize("tightest", [False, True])
def test_each_buffer_gets_the_offset_that_a_naive_search_finds(is_circle, tightest):
    dice, names = np.random.default_rng(0), tuple(map(str, range(60)))
    for _ in range(40):
        lower, length, size = (dice.integers(1, limit, 60) for limit in (29, dice.integers(2, 9), 20))
        problem = Buffers(lower, lower + length, size, names, 30 if is_circle else 0)
        order = dice.permutation(60)
        found = c_packers.place_greedily(problem, lifetime_sections(problem), order, tightest=tightest)
        assert found.tolist() == naive(problem, order.tolist(), tightest=tightest)


@pytest.mark.process
def test_ctrl_c_ends_a_search():
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may ignore it
        "from support.known_packings import gapless_problem\n"
        "from memfit.packing.best_packing import pack_buffers\n"
        "print('begun', flush=True)\npack_buffers(gapless_problem(7, 3000), 10_000, seconds=600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.readline() == b"begun\n"
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in errors


def test_running_out_of_host_memory_raises_a_memory_error(monkeypatch):
    class OutOfMemoryLibrary:
        @staticmethod
        def pack_place(*_):
            return c_packers.NO_HOST_MEMORY

    monkeypatch.setattr(c_packers, "load", OutOfMemoryLibrary)
    problem = gapless_problem(1, 30)
    with pytest.raises(MemoryError):
        c_packers.place_greedily(problem, lifetime_sections(problem), problem.size, tightest=True)
