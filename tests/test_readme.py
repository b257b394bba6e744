"""README.md: the output that it shows equals what the command prints today."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
LEFT_OUT = "..."


def shown_runs():
    """Return, for each `memfit` run of the README, its arguments and the lines that it shows."""
    (block,) = re.findall(r"```console\n(\$ memfit .*?)```", README, re.DOTALL)
    for run in re.split(r"^\$ memfit ", block, flags=re.MULTILINE)[1:]:
        command, *lines = run.splitlines()
        yield shlex.split(command), [re.sub(r"\s*[①-⑨]?$", "", line) for line in lines]


@pytest.mark.process
def test_the_readme_shows_what_its_commands_print(tmp_path):
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/gpt.py", tmp_path / "examples")
    runs = list(shown_runs())
    assert [arguments[0] for arguments, _ in runs] == ["dry-run", "plan", "dry-run", "verify"]
    for arguments, shown in runs:
        command = [sys.executable, "-m", "memfit", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        printed = [line.rstrip() for line in done.stdout.splitlines()]
        assert lines_not_in_order(shown, printed) == [], f"Copy the new output into README.md:\n{done.stdout}"


def lines_not_in_order(shown, printed):
    """Return the shown lines that were not printed in this order; `...` stands for any lines."""
    left = iter(printed)
    return [line for line in shown if line != LEFT_OUT and not any(line == found for found in left)]


def test_the_readme_is_about_a_hundred_lines():
    assert len(README.splitlines()) <= 125


@pytest.mark.process
def test_the_readme_s_python_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
