"""Fixtures that run scripts and evaluate expressions on the ghost, each in its own process."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from support import warm_process
from support.scripts import INSTALL_VALUES

LOAD_GHOST = """
from memfit.ghost.build.runtime_library import build_ghost
from memfit.ghost.ghost_device import GhostDevice
from memfit.ghost.load_ghost import load

DEVICE = GhostDevice(
    name="NVIDIA A100-SXM4-80GB", major=8, minor=0, multiprocessors=108, threads_per_multiprocessor=2048,
    blocks_per_multiprocessor=32, total_bytes=80 << 30, shared_per_block=49152, shared_per_block_optin=166912,
    shared_per_multiprocessor=167936, l2_bytes=41943040, memory_bus_bits=5120, clock_khz=1410000,
    memory_clock_khz=1593000,
)
ghost = load(build_ghost())
ghost.configure(DEVICE)
"""


@pytest.fixture
def on_ghost(tmp_path, request):
    """Return a function that runs Python code on the configured ghost and returns its output.

    With the mark `warm`, code that uses torch and asks for no environment runs in a fork of a warm process.
    """
    is_warm = request.node.get_closest_marker("warm") is not None

    def run(script, *, torch=True, **environment):
        path = tmp_path / "script.py"
        path.write_text(LOAD_GHOST + ("import torch\n" if torch else "") + textwrap.dedent(script))
        if is_warm and torch and not environment:
            done = warm_process.on_ghost(path)
        else:
            done = subprocess.run(
                [sys.executable, str(path)],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
                env={**os.environ, **environment},
            )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def evaluate(on_ghost):
    """Return a function that evaluates expressions on the ghost and returns their values."""

    def run(expressions, before="", options=""):
        script = INSTALL_VALUES + textwrap.dedent(
            f"""
            values = install({options!r})
            d = "cuda"
            x = torch.randn(4, 10, device=d)
            whole = torch.randint(5, (5,), device=d)
            """
        )
        script += textwrap.dedent(before)
        script += f"\nprint(json.dumps([eval(line) for line in {list(expressions)!r}]))\n"
        return json.loads(on_ghost(script).splitlines()[-1])

    return run
