"""Bad input gets one error message and no traceback."""

import os
import signal
import subprocess
import sys

import pytest

from support import warm_process

pytestmark = pytest.mark.process


def test_a_gpu_without_kernels_in_torch_is_refused_by_name(dry_run):
    run = dry_run("import torch; torch.ones(1, device='cuda'); print('ran')", options=("--gpu", "V100"))
    assert run.code == 3
    assert "has no kernels for V100-32GB" in run.err
    assert "ran" not in run.out


def test_a_sigterm_to_memfit_ends_the_script_as_well(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, torch\nprint(os.getpid(), flush=True)\nimport time; time.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "memfit", "dry-run", "script.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(process.stdout.readline())
    process.terminate()
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("nothing.py",), 2, "No such script"),
        (("--gpu", "RTX-9999", "script.py"), 2, "Nearest"),
        (("--memory", "lots", "script.py"), 2, "12GiB"),
        (("--steps", "0", "script.py"), 2, "at least 1"),
        (("--steps", "many", "script.py"), 2, "steps"),
        (("--nonsense", "script.py"), 2, "nonsense"),
        (("--step", "3", "script.py"), 2, "No such option: --step."),
        (("--values", "float=blue", "script.py"), 2, "float"),
        (("--memory", "1MiB", "script.py"), 2, "context"),
        (("-o", "no/such/folder/run.memfit", "script.py"), 2, "does not exist"),
        ((), 2, "No script given. Run memfit dry-run SCRIPT.py"),
        (
            ("--json", "--gpu", "H100"),
            2,
            "--json took --gpu as its file. Write memfit dry-run --json FILE --gpu.",
        ),
        (("--json", "script.py"), 2, "--json took script.py as its file. Write memfit"),
        (("--values", "float=blue", "--values", "int=2", "script.py"), 2, "blue"),
        (("--memory", "12", "script.py"), 2, "'12' has no unit, so it means 12 bytes. If you mean GiB,"),
        (("notebook.ipynb",), 2, "jupyter nbconvert --to python notebook.ipynb\n    sed -i "),
        (("--gpu", "0", "script.py"), 2, "-- SCRIPT --gpu 0"),
        (("script.py",), 3, "without using the GPU"),
    ],
)
def test_bad_input_gets_one_error(tmp_path, options, code, words):
    (tmp_path / "script.py").write_text("import torch\nprint('ran')\n")
    (tmp_path / "notebook.ipynb").touch()
    done = warm_process.memfit("dry-run", *options, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*.memfit*"))


@pytest.mark.slow
def test_a_script_that_torchrun_starts_is_run_through_it(dry_run):
    run = dry_run("import os, torch; torch.ones(1, device=int(os.environ['LOCAL_RANK']))")
    assert run.err.strip().endswith("If torchrun starts it, write memfit dry-run torchrun script.py")


def test_a_closed_stdout_loses_no_file_and_prints_no_error(dry_run):
    run = dry_run("import torch; torch.ones(1, device='cuda')", options=("-o", "run.memfit"))
    assert run.code == 0, run.err
    reader, stdout = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "memfit", "explain", "run.memfit", "--json", "answer.json"],
        cwd=run.folder,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(stdout)
    assert (done.returncode, done.stderr) == (141, "")
    assert (run.folder / "answer.json").is_file()
