"""Standbys of scripts that stand in their way: nothing goes on as the script that is not the script."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from memfit.analysis.dry_run_result import dry_run_of_trace
from memfit.trials.script_standbys import ScriptStandbys
from support.standby_runs import OPTIONS, Runs, script_of

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("warm_scripts")]


def test_a_standby_collects_the_ends_of_its_forks_itself(tmp_path):
    ignored = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)"
    with ScriptStandbys() as standbys:
        runs = Runs(script_of(tmp_path, ignored), standbys)
        for forked in (False, True, True):
            runs.run()
            assert runs.forked == forked


def test_a_standby_ignores_a_closed_terminal_as_the_script_does_under_nohup(tmp_path):
    ignored = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with ScriptStandbys() as standbys:
        runs = Runs(script_of(tmp_path, ignored), standbys)
        runs.run()
        (kept,) = standbys._kept
        assert kept.is_ready
        os.kill(kept._process, signal.SIGHUP)
        runs.run()
        assert runs.forked


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_fork_that_cannot_be_made_leaves_the_script_alone(tmp_path, number):
    """They are made in the script's process, in that between it and the standby, and in the standby."""
    before = f"""
sys.excepthook = lambda *_: open(__file__ + '.raised', 'w')
def fork(real=os.fork, calls=[]):
    calls.append(None)
    if len(calls) == {number}:
        raise BlockingIOError(11, 'no more processes')
    return real()
os.fork = fork
"""
    script = script_of(tmp_path, before)
    with ScriptStandbys() as standbys:
        runs = Runs(script, standbys)
        for _ in range(2):
            runs.run()
            assert not runs.forked
        assert ("no more processes" in runs.why_whole) == (number == 1)
    assert not Path(f"{script}.raised").exists()


def test_a_script_that_has_met_the_end_of_memory_starts_anew_with_more(tmp_path):
    before = """
def cache(size):
    try:
        return torch.empty(size << 30, dtype=torch.uint8, device='cuda')
    except torch.OutOfMemoryError:
        return cache(size // 2)
held = cache(8)"""
    with ScriptStandbys() as standbys:
        runs = Runs(script_of(tmp_path, before), standbys)
        small = runs.run(replace(OPTIONS, memory=6 << 30))
        large = runs.run()
        assert not runs.forked
        assert "memory has run out" in runs.why_whole
    assert [dry_run_of_trace(each.trace).peak_allocated >> 30 for each in (small, large)] == [4, 8]
