"""A script runs and ends as it does under python; a warm process runs those tests that ask how it ended."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from support.new_processes import start_memfit
from support.scripts import TRAIN

pytestmark = pytest.mark.process


@pytest.mark.slow
def test_the_script_sees_the_environment_that_python_gives_it(dry_run):
    script = """
        import os, pickle, sys, torch
        class Mine: pass
        print(__name__, __file__, sys.argv, os.path.basename(sys.path[0]) == os.path.basename(os.getcwd()))
        print(sys.modules["__main__"].Mine is Mine, pickle.loads(pickle.dumps(Mine())).__class__ is Mine)
        torch.ones(1, device="cuda")
    """
    run = dry_run(script, "--steps", "9", "--json", "x")
    first, second = run.out.splitlines()[:2]
    assert first == f"__main__ {run.folder}/script.py ['script.py', '--steps', '9', '--json', 'x'] True"
    assert second == "True True"


@pytest.mark.slow
def test_a_module_runs_as_with_python_m(dry_run, tmp_path):
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(
        "import sys, torch\nfrom . import __name__ as name\n"
        "print(__name__, name, sys.argv[1:])\nx = torch.ones(1, device='cuda')\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "dry-run", "-m", "trainer.main", "--lr", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == "__main__ trainer ['--lr', '1']"


@pytest.mark.slow
def test_find_spec_of_torch_before_its_import_does_not_prevent_recording(dry_run):
    find = "import importlib.util\nassert importlib.util.find_spec('torch')\n"
    run = dry_run(find + textwrap.dedent(TRAIN) + "for _ in range(9): step()\n")
    assert run.answer["steps"] == 3


@pytest.mark.slow
def test_files_in_the_working_folder_do_not_shadow_the_standard_library(tmp_path, dry_run):
    (tmp_path / "platform.py").write_text("raise RuntimeError('not the standard library')\n")
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "train.py").write_text("import torch; torch.ones(1, device='cuda'); print('ran')\n")
    memfit = [sys.executable, "-P", "-m", "memfit", "dry-run", str(folder / "train.py")]
    done = subprocess.run(memfit, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("ran\n"), done.stderr


@pytest.mark.warm
def test_training_in_a_thread_is_measured(dry_run):
    script = (
        TRAIN
        + """
    import threading
    def train():
        for _ in range(9): step()
    threading.Thread(target=train).start()
    """
    )
    run = dry_run(script)
    assert run.answer["steps"] == 3
    assert run.answer["end"]["reason"] == "steps"
    assert "EnoughStepsReached" not in run.err


@pytest.mark.warm
@pytest.mark.parametrize(
    ("fails", "verdict"),
    [("raise RuntimeError('boom')", "unknown"), ("torch.empty(1 << 40, device='cuda')", "out of memory")],
)
def test_a_failure_in_a_thread_is_the_scripts(dry_run, fails, verdict):
    run = dry_run(
        f"""
        import threading, torch
        def train():
            torch.ones(1, device="cuda")
            {fails}
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        """
    )
    assert run.answer["verdict"] == verdict
    assert run.answer["end"]["where"].endswith("script.py:5")
    assert "caught the error" not in run.out


@pytest.mark.slow
def test_threads_that_never_end_do_not_block_the_result(dry_run):
    script = (
        TRAIN
        + """
    import threading
    threading.Thread(target=threading.Event().wait).start()
    for _ in range(9): step()
    """
    )
    assert dry_run(script).answer["end"]["reason"] == "steps"


@pytest.mark.warm
def test_a_loop_that_turns_every_exception_into_an_exit_code_still_ends_by_steps(dry_run):
    script = (
        TRAIN
        + """
    try:
        for _ in range(9): step()
    except BaseException:
        raise SystemExit(1)
    """
    )
    run = dry_run(script)
    assert run.code == 0
    assert run.answer["end"]["reason"] == "steps"


@pytest.mark.warm
def test_an_exception_of_the_script_is_reported_with_its_own_traceback(dry_run):
    script = TRAIN + "    step()\n    raise KeyError('mine')\n"
    run = dry_run(script, options=("-o", "run.memfit"))
    assert run.code == 3
    assert "KeyError: 'mine'" in run.err
    assert "memfit/run" not in run.err.split("KeyError")[0]
    assert run.answer["end"]["exception"] == "KeyError: 'mine'"
    assert run.answer["verdict"] == "unknown"
    assert "INCOMPLETE" in run.out
    assert run.answer["steps"] == 1
    assert (run.folder / "run.memfit").exists()


@pytest.mark.warm
def test_sys_exit_sets_the_exit_code_and_prints_its_message(dry_run):
    script = TRAIN + "    step()\n    import sys; sys.exit({})\n"
    assert dry_run(script.format("0")).code == 0
    failed = dry_run(script.format("'went wrong'"))
    assert failed.code == 3
    assert "went wrong" in failed.err
    assert failed.answer["end"]["exit_code"] == 1
    assert failed.answer["end"]["exception"] == "went wrong"
    assert failed.answer["verdict"] == "unknown"
    assert "INCOMPLETE" in failed.out
    assert "The script ended with exit code 1: went wrong  script.py:" in failed.out


@pytest.mark.warm
def test_wrong_arguments_after_cuda_was_used_are_incomplete(dry_run):
    run = dry_run("""
        import argparse, torch
        torch.ones(1, device="cuda")
        argparse.ArgumentParser().parse_args()
    """, "--nope", options=("--fail",))  # fmt: skip
    assert run.code == 3
    assert (run.answer["verdict"], run.answer["end"]["exit_code"]) == ("unknown", 2)
    assert "The script ended with exit code 2  script.py:4" in run.out
    assert "FITS" not in run.out


@pytest.mark.warm
def test_a_dry_run_to_the_end_covers_all_steps(dry_run):
    script = TRAIN + "    for _ in range(5): step()\n    torch.ones(1 << 28, device='cuda')\n"
    run = dry_run(script, options=("--to-end",))
    assert (run.answer["steps"], run.answer["end"]["reason"]) == (5, "end")
    assert "This result covers the whole run: 5 training steps." in run.out
    assert run.answer["peak"]["allocated"] > 1 << 30


def test_exit_handlers_run_and_output_is_flushed(dry_run):
    script = TRAIN + "    import atexit; atexit.register(print, 'goodbye')\n    for _ in range(9): step()\n"
    assert "goodbye" in dry_run(script).out


def test_json_on_stdout_is_not_mixed_with_the_scripts_output(dry_run):
    run = dry_run(TRAIN + "    print('chatter'); step()\n", options=("--json", "-"), json_answer=False)
    assert json.loads(run.out)["steps"] == 1
    assert "chatter" in run.err


@pytest.mark.warm
def test_a_fork_of_the_script_writes_no_result(dry_run):
    script = (
        TRAIN
        + """
    import os
    step()
    if os.fork() == 0:
        raise SystemExit(0)
    os.wait()
    step()
    """
    )
    run = dry_run(script)
    assert run.code == 0
    assert run.answer["steps"] == 2


@pytest.mark.slow
def test_ctrl_c_ends_the_script_and_keeps_the_trace(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(TRAIN) + "step()\nprint('ready', flush=True)\nimport time; time.sleep(60)\n"
    )
    process = start_memfit("dry-run", "-o", "run.memfit", "script.py", cwd=tmp_path)
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "INCOMPLETE" in out
    assert (tmp_path / "run.memfit").exists()


def test_the_list_of_processes_shows_the_script_and_no_settings(dry_run):
    script = "import torch; torch.ones(1, device='cuda'); print(open('/proc/self/cmdline').read())"
    run = dry_run(script, "--lr")
    shown = run.out.split("\0")
    assert shown[-3:-1] == ["script.py", "--lr"]
    assert "{" not in run.out.splitlines()[-1]
    assert len(shown[-4]) < 100  # the file of settings
