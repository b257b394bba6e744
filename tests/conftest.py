"""Shared fixtures: a dry run of a short script and its result; and the mark of tests that start processes.

`make test-fast` runs the tests that start no process. A test that starts one has the mark ``process``, set by
hand or because it uses a fixture of ``STARTERS``. A test without the mark fails if it starts a process.

With several workers, tests that share a fixture run on one of them, which makes the fixture once.
"""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import pytest

# One thread for each worker and process: several spin while they wait for a core that another worker uses.
os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch  # noqa: F401 - its import starts ldconfig, so it must precede the refusal of processes

from memfit.allocator import compiled_allocator
from memfit.arenas import arena_library as compiled_arena
from memfit.ghost.build import runtime_library
from memfit.packing import c_packers as compiled_packer
from support import warm_process

hypothesis.settings.register_profile("memfit", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("memfit")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it, as do its own


@dataclass(frozen=True)
class DryRunOutput:
    """Result of one `memfit dry-run`."""

    code: int
    out: str
    err: str
    answer: dict | None
    folder: Path


@pytest.fixture
def dry_run(tmp_path, request):
    """Return a function that writes a script, runs `memfit dry-run` on it, and reads the JSON.

    ``environment`` has further variables. With the mark `warm`, and without options for the process, memfit
    is run in a fork of a warm process. The test fails if a script that trains fits without having made a
    training step, unless ``without_step`` says why that is so.
    """
    is_warm = request.node.get_closest_marker("warm") is not None

    def run(script, *arguments, options=(), json_answer=True, environment=None, without_step="", **popen):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        answer = tmp_path / "answer.json"
        answer.unlink(missing_ok=True)
        json_options = ("--json", str(answer)) if json_answer else ()
        command = ("dry-run", *json_options, *options, "--", "script.py", *arguments)
        if is_warm and not popen:
            done = warm_process.memfit(*command, cwd=tmp_path, **(environment or {}))
        else:
            done = subprocess.run(
                [sys.executable, "-m", "memfit", *command],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                check=False,
                timeout=120,
                **({"env": os.environ | (environment or {})} | popen),
            )
        found = json.loads(answer.read_text()) if answer.exists() else None
        lacks_steps = _lacks_steps(script, found) and not without_step
        assert not lacks_steps, "the script has an optimizer, ran backward passes without a step, and fits"
        return DryRunOutput(done.returncode, done.stdout, done.stderr, found, tmp_path)

    return run


def _lacks_steps(script, found):
    """Return whether a script fits that has an optimizer, ran backward passes, and made no training step."""
    fits = found is not None and found["verdict"] in ("fits", "tight") and not found["steps"]
    ran_backward = fits and re.search(r"no training step \(\d+ backward passes\)", str(found["notes"]))
    return bool(ran_backward and re.search(r"\boptim\w*\.|\.step\(", script))


@pytest.fixture
def warm_scripts():
    """Run the scripts that memfit's functions start in forks of the warm process."""
    with warm_process.scripts():
        yield


_RANKS = {"two_ranks", "four_ranks"}
_ON_GHOST = {"dry_run", "on_ghost", "warm_scripts"}
STARTERS = {"browser", "drive", "memfit", "record", "rehearse"} | _ON_GHOST | _RANKS
"""Fixtures that start processes."""


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """Mark tests that use a fixture of ``STARTERS``; group those that start a process and share a fixture."""
    for item in items:
        if STARTERS.intersection(item.fixturenames):
            item.add_marker("process")
        if "process" in item.keywords and "xdist_group" not in item.keywords and (group := _shares(item)):
            item.add_marker(pytest.mark.xdist_group(group))


def _shares(item):
    """Return the file or folder whose tests share a fixture with a test; None if it shares none."""
    used = item._fixtureinfo.name2fixturedefs.values()
    shared = {each[-1].scope: each[-1].baseid for each in used if each[-1].baseid}
    if "session" in shared:
        return shared["session"]
    return item.nodeid.partition("::")[0] if "module" in shared else None


def pytest_sessionstart():
    """Compile memfit's C code before the first test: on a new machine, the compiler is a process, too."""
    for compiled in (compiled_allocator, compiled_arena, compiled_packer):
        compiled.LIBRARY.load()
    runtime_library.build_ghost()


def pytest_sessionfinish():
    """End the process in whose forks tests with the mark `warm` run memfit."""
    warm_process.stop()


_STARTING = {"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}
_running = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Remember which test is running, setup and teardown included."""
    _running[:] = [item]
    result = yield
    _running.clear()
    return result


def _refuse_without_the_mark(event, arguments):
    lists_fonts = event == "subprocess.Popen" and arguments[0] == "fc-list"  # matplotlib, once a machine
    if event in _STARTING and not lists_fonts and _running and "process" not in _running[0].keywords:
        raise AssertionError(f"{_running[0].nodeid} starts a process ({event}): mark it `process`.")


sys.addaudithook(_refuse_without_the_mark)
