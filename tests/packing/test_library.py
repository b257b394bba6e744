"""The compiled packers: under sanitizers, cancelled, interrupted."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from guillotine import cut
from memfit.packing import library
from memfit.packing.buffers import sections
from sanitized import build

CHECK = Path(__file__).with_name("check.c")


def test_under_sanitizers(tmp_path):
    sources = [CHECK, *sorted(library.SOURCES.glob("*.c"))]
    check = build(tmp_path / "check", sources, f"-I{library.SOURCES}")
    done = subprocess.run([str(check), "0", "400"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(int(count) for count in re.findall(r"\d+", done.stdout)), done.stdout  # each happened


def test_ctrl_c_ends_a_search_at_once():
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell may ignore it
        "from guillotine import cut\nfrom memfit.packing.best import pack\n"
        "print('begun', flush=True)\npack(cut(7, 3000), 10_000, seconds=600)"
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
        _, said = process.communicate(timeout=60)
    assert b"KeyboardInterrupt" in said


def test_a_library_that_is_short_of_memory_says_so(monkeypatch):
    class Short:
        @staticmethod
        def pack_place(*_):
            return library.NO_HOST_MEMORY

    monkeypatch.setattr(library, "load", Short)
    problem = cut(1, 30)
    with pytest.raises(MemoryError):
        library.place(problem, sections(problem), problem.size, tightest=True)
