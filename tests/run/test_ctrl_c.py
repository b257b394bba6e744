"""Ctrl-C ends memfit and all that it started, and a killed memfit takes its script along."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from memfit.python_command import code_running_module
from memfit.records import Action
from memfit.run.child_start import ChildSettings, child_settings_as_json
from memfit.run.options import RunOptions
from memfit.run.script_end import classify_script_end
from memfit.trace.trace_file import write_trace
from support import interrupts
from support.new_processes import run_python, start_memfit
from support.traces import BASE, Event, freed, segment, trace_of

TIMES = int(os.environ.get("MEMFIT_TIMES", "1"))
COMMANDS = [("dry-run",), ("verify", "--plan", "plan.json")]


def start(folder, script, command=("dry-run",), before=()):
    """Start a command on a script in a process group of its own, with temporary files in ``tmp``.

    ``before`` is a command that starts it.
    """
    (folder / "script.py").write_text(textwrap.dedent(script))
    (folder / "plan.json").write_text('{"plan": {}}')
    (folder / "tmp").mkdir()
    return start_memfit(*command, "script.py", cwd=folder, before=before, TMPDIR=str(folder / "tmp"))


def written(file, process):
    """Wait for the line of process IDs that a script writes, and return them."""
    while not file.exists() or not file.read_text().endswith("\n"):
        assert process.poll() is None
        time.sleep(0.02)
    return [int(pid) for pid in file.read_text().split()]


def ends(pid):
    """Return whether a process ends, which may take a moment."""
    for _ in range(500):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.timeout(300 * TIMES)
def test_ctrl_c_at_random_moments_leaves_nothing_behind(tmp_path):
    (tmp_path / "train.py").write_text(interrupts.SCRIPT)
    block = [Event(Action.ALLOC, BASE, 512), *freed(BASE, 512)]
    history = [Event(Action.SEGMENT_ALLOC, BASE, 2 << 20), *block]
    write_trace(trace_of(history, segments=[segment(BASE, 2 << 20, "small")]), tmp_path / "run.memfit")
    spans = {name: interrupts.span(name, tmp_path) for name in interrupts.COMMANDS}
    found = list(interrupts.interruptions(spans, 10 * TIMES, 0, tmp_path))
    assert not [one for one in found if one.faults]


@pytest.mark.process
def test_a_script_that_swallows_ctrl_c_is_killed_with_what_it_started(tmp_path):
    process = start(
        tmp_path,
        """
        import signal, subprocess, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
        time.sleep(60)
        """,
    )
    child = int(process.stdout.readline())
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error) == (130, "memfit: interrupted; there was no result yet.\n")
    assert ends(child)


@pytest.mark.slow
@pytest.mark.process
def test_ctrl_c_counts_even_if_the_script_catches_it_and_goes_on_to_its_end(tmp_path):
    process = start(
        tmp_path,
        """
        import time, torch
        x = torch.ones(1, device="cuda")
        try:
            print("ready", flush=True)
            time.sleep(60)
        except KeyboardInterrupt:
            pass
        """,
    )
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "")


@pytest.mark.process
@pytest.mark.parametrize("command", COMMANDS, ids=lambda given: given[0])
def test_a_killed_memfit_takes_its_script_along(tmp_path, command):
    script = "import os, time; open('pid', 'w').write(f'{os.getpid()}\\n'); time.sleep(60)"
    process = start(tmp_path, script, command)
    (pid,) = written(tmp_path / "pid", process)
    process.kill()
    assert ends(pid)
    process.communicate()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_an_interrupted_or_killed_torchrun_takes_its_ranks_along(tmp_path, number):
    script = """
        import os, time, torch.distributed as dist
        dist.init_process_group("nccl")
        open(f"pid{os.environ['RANK']}", "w").write(f"{os.getppid()} {os.getpid()}\\n")
        time.sleep(60)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "memfit")
    process = subprocess.Popen(
        [sys.executable, *launch, "dry-run", "script.py"],
        cwd=tmp_path,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    pids = [pid for rank in "01" for pid in written(tmp_path / f"pid{rank}", process)]
    process.send_signal(number)
    assert all(map(ends, pids))
    process.wait(timeout=60)


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("command", COMMANDS, ids=lambda given: given[0])
def test_a_terminated_memfit_removes_its_files_and_ends_what_the_script_has_started(
    tmp_path, command, number
):
    script = """
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "60"])
        open("pid", "w").write(f"{os.getpid()} {child.pid}\\n")
        time.sleep(60)
    """
    # Where the tests run under nohup, memfit would inherit a SIGHUP that is ignored, and go on.
    inherited = signal.signal(number, signal.SIG_DFL)
    try:
        process = start(tmp_path, script, command)
    finally:
        signal.signal(number, inherited)
    pids = written(tmp_path / "pid", process)
    assert list((tmp_path / "tmp").iterdir())
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert not list((tmp_path / "tmp").iterdir())
    assert all(map(ends, pids))


@pytest.mark.process
@pytest.mark.parametrize(
    "command", [COMMANDS[0], pytest.param(COMMANDS[1], marks=pytest.mark.slow)], ids=lambda given: given[0]
)
def test_a_closed_terminal_does_not_end_memfit_under_nohup(tmp_path, command):
    script = """
        import os, time, torch
        open("pid", "w").write(f"{os.getpid()}\\n")
        while not os.path.exists("go"):
            time.sleep(0.02)
        model = torch.nn.Linear(4, 4).to("cuda")
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.ones(2, 4, device="cuda")).sum().backward()
        optimizer.step()
    """
    process = start(tmp_path, script, command, before=["nohup"])
    written(tmp_path / "pid", process)
    os.killpg(process.pid, signal.SIGHUP)
    (tmp_path / "go").touch()
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0, error
    assert out.startswith(("FITS", "VERIFIED"))


@pytest.mark.process
def test_a_script_does_not_run_if_memfit_has_gone_before_it_started(tmp_path):
    pipe = tmp_path / "progress"
    os.mkfifo(pipe)  # which nothing reads
    (tmp_path / "script.py").write_text("print('ran')")
    settings = tmp_path / "settings.json"
    settings.write_text(child_settings_as_json(ChildSettings(RunOptions(), None, "", "", "", str(pipe))))
    code = code_running_module("memfit.run.child")
    done = subprocess.run(
        [sys.executable, "-c", code, str(settings), "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_ctrl_c_that_a_library_reports_as_its_own_error_is_an_interruption():
    error = ImportError("numpy failed to import")
    error.__context__ = KeyboardInterrupt()
    end = classify_script_end(error)
    assert (end.reason, end.exit_code) == ("interrupted", 130)


@pytest.mark.process
def test_ctrl_c_that_a_library_of_the_command_reports_as_its_own_error_is_an_interruption():
    """NumPy drops the KeyboardInterrupt where it compares structured arrays, and keeps no trace of it."""
    script = """
        import os, signal
        from memfit.termination_signals import SignalsAsExceptions, exit_silently_on_ctrl_c
        def compare():
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass
            raise TypeError("Cannot compare structured arrays")
        exit_silently_on_ctrl_c()
        try:
            with SignalsAsExceptions():
                compare()
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = run_python("-c", textwrap.dedent(script), timeout=25)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


@pytest.mark.process
@pytest.mark.parametrize("delay", [0, 0.1], ids=["idle machine", "busy machine"])
def test_ctrl_c_in_a_finaliser_is_raised_once_more(delay):
    """Python itself would print 'Exception ignored in' and go on.

    On a busy machine, the second signal comes before Python's hook has returned.
    """
    script = f"""
        import os, signal, threading, time
        from memfit.termination_signals import SignalsAsExceptions, exit_silently_on_ctrl_c
        class Finalised:
            def __del__(self):
                os.kill(os.getpid(), signal.SIGINT)
        start, delays = threading.Timer.start, [{delay}]
        threading.Timer.start = lambda self: (start(self), time.sleep(delays.pop() if delays else 0))
        exit_silently_on_ctrl_c()
        try:
            with SignalsAsExceptions():
                Finalised()
                time.sleep(30)
        except KeyboardInterrupt:
            print("interrupted")
    """
    done = run_python("-c", textwrap.dedent(script), timeout=25)
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")
