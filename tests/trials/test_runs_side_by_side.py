"""Runs made side by side before a search asks for them."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import pytest

from memfit.analysis.trial_result import TrialResult
from memfit.records import Change, ScriptEnd
from memfit.run.parent import ScriptProgress
from memfit.trials import runs_side_by_side
from memfit.trials.runs_side_by_side import ProgressOfFirst, RunsAhead
from support.traces import trace_of

CHANGES = [Change(fused=fused, eager=eager) for fused, eager in ((False, False), (True, False), (True, True))]
FAILED = ScriptEnd("exception", 1, "FileExistsError: out")
PATIENCE = 20


class Script:
    """A script; runs that another one must be beside wait for it.

    Args:
        beside: how many runs wait for each other.
        failing: changes under which a run fails beside another.
    """

    def __init__(self, beside=1, failing=()):
        self.failing = failing
        self.barrier = threading.Barrier(beside)
        self.ran = []

    def __call__(self, change, what):
        self.ran.append(what)
        if threading.current_thread() is not threading.main_thread():
            self.barrier.wait(PATIENCE)
            if change in self.failing:
                return FAILED
        return TrialResult(trace_of([]), models=(what,))


@pytest.fixture
def two_processors(monkeypatch):
    monkeypatch.setattr(runs_side_by_side, "most_scripts_side_by_side", lambda: 2)


def named(*names):
    return list(zip(CHANGES, names, strict=False))


@pytest.mark.usefixtures("two_processors")
def test_two_runs_are_made_at_once_and_neither_is_made_again():
    script = Script(beside=2)
    runs = RunsAhead(script, ProgressOfFirst(print))
    runs.make(named("a", "b"))
    assert sorted(script.ran) == ["a", "b"]
    assert runs.run(CHANGES[1], "another name").models == ("b",)
    assert runs.run(CHANGES[0], "a").models == ("a",)
    assert runs.run(CHANGES[2], "c").models == ("c",)
    assert script.ran[2:] == ["c"]


@pytest.mark.usefixtures("two_processors")
def test_a_run_that_fails_beside_another_is_made_again_alone():
    script = Script(beside=2, failing=CHANGES[:1])
    runs = RunsAhead(script, ProgressOfFirst(print))
    runs.make(named("a", "b"))
    assert runs.run(CHANGES[0], "a").models == ("a",)
    assert sorted(script.ran) == ["a", "a", "b"]


@pytest.mark.usefixtures("two_processors")
def test_what_is_kept_already_is_not_made_again_and_one_run_alone_is_left_to_the_search():
    script = Script(beside=2)
    runs = RunsAhead(script, ProgressOfFirst(print))
    runs.make(named("a", "b"))
    runs.make(named("a", "b", "c"))
    assert sorted(script.ran) == ["a", "b"]


@pytest.mark.parametrize(("processors", "memory", "most"), [(8, 1 << 60, 8), (1, 1 << 60, 1), (8, 0, 1)])
def test_as_many_run_side_by_side_as_there_are_processors_and_memory_for(
    monkeypatch, processors, memory, most
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(processors)))
    monkeypatch.setattr(runs_side_by_side, "_available_memory", lambda: memory)
    assert runs_side_by_side.most_scripts_side_by_side() == most


def test_the_memory_that_processes_can_still_take_is_that_of_this_machine():
    assert (
        1 << 20
        < runs_side_by_side._available_memory()
        < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


def test_the_first_run_shows_its_progress_and_how_many_are_beside_it():
    shown = []
    progress = ProgressOfFirst(shown.append)
    first, second = (ScriptProgress(step=1, trying=name) for name in "ab")
    with progress.of("b"):
        with progress.of("a"):
            progress.show(first)
            progress.show(second)
        progress.show(second)
    progress.show(first)
    assert shown == [replace(second, beside=1), second, first]


def test_the_first_error_ends_the_others():
    started = threading.Event()

    def fails():
        started.wait(PATIENCE)
        raise ValueError

    def waits():
        with runs_side_by_side.leave_ctrl_c_to_script(0.0) as interruption:
            started.set()
            until = time.monotonic() + PATIENCE
            while not interruption.exhausted(writing=False):
                assert time.monotonic() < until
                time.sleep(0.01)

    with pytest.raises(ValueError):  # noqa: PT011 - its own
        runs_side_by_side.run_scripts_side_by_side([fails, waits], 2)


TWO_RUNS = """
    import sys
    from functools import partial
    from memfit.run.options import RunOptions
    from memfit.run.parent import run_script
    from memfit.run.resolve_ghost_settings import resolve_ghost_settings
    from memfit.trials.runs_side_by_side import run_scripts_side_by_side

    options = RunOptions()
    ghost = resolve_ghost_settings(options)
    run = partial(run_script, options=options, ghost=ghost, output=None, on_progress=str)
    run_scripts_side_by_side([partial(run, ("script.py", name)) for name in "ab"], 2)
"""
SLEEPS = """
    import signal, sys, time
    from pathlib import Path
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(sys.argv[1]).touch()
    time.sleep(120)
"""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_ends_both_scripts_and_leaves_no_folder(tmp_path, number):
    (tmp_path / "script.py").write_text(textwrap.dedent(SLEEPS))
    (temporary := tmp_path / "tmp").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(TWO_RUNS)],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(temporary)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    until = time.monotonic() + 120
    while not ((tmp_path / "a").exists() and (tmp_path / "b").exists()):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(PATIENCE)
    assert process.returncode == (-signal.SIGINT if number == signal.SIGINT else 128 + signal.SIGTERM)
    assert not list(temporary.iterdir())
    with pytest.raises(ProcessLookupError):  # nothing of its session is left
        os.killpg(process.pid, 0)
