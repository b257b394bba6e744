"""``memfit job``: the job that it writes for a script runs, and says what it needs."""

from pathlib import Path

import pytest

from support.warm_process import memfit

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = [pytest.mark.process, pytest.mark.warm]


def test_the_job_of_a_script_needs_what_the_script_needs(tmp_path):
    (tmp_path / "gpt.py").write_text((EXAMPLES / "gpt.py").read_text())
    done = memfit("job", tmp_path / "gpt.py", "--batch-size", 1, "--context", 64)
    assert done.returncode == 0, done.stderr
    assert f"WROTE {tmp_path}/job.py   2.33 GiB exact at its peak, 512 B more than gpt.py" in done.stdout
    assert f"{tmp_path}/job.py:make_job --batch-size 1" in done.stdout

    again = memfit("job", tmp_path / "gpt.py")
    assert again.returncode == 2
    assert "exists, and may be your own work" in again.stderr


@pytest.mark.slow
def test_a_loop_of_a_library_is_refused(tmp_path):
    done = memfit("job", "-o", tmp_path / "job.py", EXAMPLES / "hf_trainer.py")
    assert done.returncode == 3
    assert "a library has the training loop" in done.stderr
    assert not (tmp_path / "job.py").exists()
