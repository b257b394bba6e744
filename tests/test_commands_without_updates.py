"""Commands refuse to answer from a run that trained and made no update, and name the value to set."""

import pytest

from memfit.errors import TargetError
from support.warm_process import memfit

SCRIPT = """\
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(torch.ones(64, 256), batch_size=8):
    loss = model(batch.cuda()).square().mean()
    loss.backward()
    if (loss > 1e9).int().item():
        continue
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path):
    """Return the folder of a script that skips every update, unless line 8 reads 0."""
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--gpu", "A100-80GB"),
        ("max-batch", "--budget", "600MiB"),
        pytest.param(("compare",), marks=pytest.mark.slow),
        ("check", "--update"),
    ],
    ids=lambda command: command[0],
)
def test_a_run_without_an_update_is_no_measurement(script, command):
    done = memfit(*command, "train.py", cwd=script)
    assert done.returncode == TargetError.exit_code
    assert done.stdout == ""
    error = done.stderr.splitlines()[-1]
    assert "the script ran 8 backward passes, and its optimizers never stepped. A GPU value that" in error
    assert f"1 for an integer at {script}/train.py:8 (to try another: --values train.py:8=0)" in error
    done = memfit(*command, "--values", "train.py:8=0", "train.py", cwd=script)
    assert done.returncode == 0, done.stderr


@pytest.mark.process
def test_a_trace_without_an_update_says_so_when_it_is_explained(script):
    memfit("dry-run", "-o", "run.memfit", "train.py", cwd=script)
    done = memfit("explain", "run.memfit", "--html", "report.html", cwd=script)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("INCOMPLETE ")
    assert "its optimizers never stepped" in lines[1]
    assert lines[3] == "  1 for an integer at train.py:8 (to try another: --values train.py:8=0)"
    assert "--values train.py:8=0" in (script / "report.html").read_text()


@pytest.mark.process
def test_advice_and_the_total_need_name_the_missing_updates(script):
    done = memfit("dry-run", "--memory", "513MiB", "train.py", cwd=script)
    assert done.stdout.startswith("OUT OF MEMORY")
    again = "is unknown: in a second run, with unlimited memory, the script ran 8 backward passes"
    assert again in done.stdout
    assert "(to try another: --values train.py:8=0)" in done.stdout
    done = memfit("dry-run", "--advise", "train.py", cwd=script)
    assert "No advice: the script ran 8 backward passes, and its optimizers never stepped." in done.stdout
