"""Forks of a warm process (tests/support/warm_process.py) answer, print and end as memfit does."""

import json
import re
import textwrap

import pytest

from support import warm_process
from support.new_processes import run_python
from support.scripts import TRAIN

pytestmark = pytest.mark.process

CLOCK = re.compile(r"(?<=\[W)\d+ [\d:.]+|^memfit: (?:trying: .*|.* · \d+ s)\n", re.MULTILINE)
"""When PyTorch warned, and lines that a slow run prints."""

THREE_STEPS = textwrap.dedent(TRAIN) + "for number in range(3):\n    step()\n    print('step', number)\n"
FAILS = (
    THREE_STEPS + "import sys\nprint('at the end', file=sys.stderr)\nraise ValueError(torch.rand(1).item())\n"
)
CHECKPOINTS = """
import torch
from torch.utils.checkpoint import checkpoint  # which imports Dynamo

model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU()).cuda()
checkpoint(model, torch.ones(4096, 512, device="cuda"), use_reentrant=False).sum().backward()
"""


@pytest.mark.parametrize(
    ("script", "options", "code"),
    [
        pytest.param(THREE_STEPS, ("--advise",), 0, marks=pytest.mark.slow),  # runs go on from a standby
        pytest.param(THREE_STEPS, ("--memory", "514MiB"), 0, marks=pytest.mark.slow),
        pytest.param(CHECKPOINTS, (), 0, marks=pytest.mark.slow),
        pytest.param(FAILS, ("--to-end",), 3, marks=pytest.mark.slow),
        ("import torch\n", (), 3),
        ("print(1 +)\n", (), 3),
    ],
    ids=["trains", "out of memory", "checkpoints", "fails", "no GPU", "not Python"],
)
def test_a_fork_does_what_a_new_process_does(script, options, code, tmp_path):
    (tmp_path / "script.py").write_text(script)
    arguments = ("dry-run", "--json", "answer.json", *options, "script.py")
    results = []
    for run in (warm_process.memfit, new_process):
        done = run(*arguments, cwd=tmp_path)
        answer = tmp_path / "answer.json"
        found = json.loads(answer.read_text()) if answer.exists() else None
        answer.unlink(missing_ok=True)
        results.append((done.returncode, done.stdout, CLOCK.sub("", done.stderr), found))
    assert results[0] == results[1]
    assert results[0][0] == code, results[0]


def new_process(*arguments, cwd):
    return run_python("-m", "memfit", *arguments, cwd=cwd)


def test_a_run_has_the_environment_of_its_test_and_none_of_an_earlier_one(tmp_path, monkeypatch):
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nprint(sorted(name for name in os.environ if name.startswith('OF_A_TEST')))\n"
    )
    monkeypatch.setenv("OF_A_TEST_1", "1")
    assert warm_process.on_ghost(script).stdout == "['OF_A_TEST_1']\n"
    monkeypatch.delenv("OF_A_TEST_1")
    monkeypatch.setenv("OF_A_TEST_2", "1")
    assert warm_process.on_ghost(script).stdout == "['OF_A_TEST_2']\n"


def test_a_fork_that_is_killed_has_no_other_exit_code(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert warm_process.on_ghost(script).returncode == -9
