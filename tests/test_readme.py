"""README.md: the output that it shows equals what the command prints today."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import memfit
from support import shown_output

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def shown_runs():
    """Return, for each `memfit` run of the README, its arguments and the lines that it shows."""
    for command in shown_output.commands(README):
        program, *arguments = command.words
        if program == "memfit" and command.shown:
            yield arguments, [re.sub(r"\s*[①-⑨]?$", "", line) for line in command.shown]


@pytest.mark.process
def test_the_readme_shows_what_its_commands_print(tmp_path):
    (tmp_path / "examples").mkdir()
    shutil.copy(ROOT / "examples/gpt.py", tmp_path / "examples")
    runs = list(shown_runs())
    assert [arguments[0] for arguments, _ in runs] == [
        *("dry-run", "compare", "plan", "dry-run", "verify", "train")
    ]
    for arguments, shown in runs:
        command = [sys.executable, "-m", "memfit", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        lines = (
            done.stderr if arguments[0] == "train" else done.stdout
        )  # whose standard output is the script's
        printed = [line.rstrip() for line in lines.splitlines()]
        missing = shown_output.not_printed(shown, printed)
        assert missing == [], f"Copy the new output into README.md:\n{done.stdout}"


@pytest.mark.slow
@pytest.mark.process
def test_what_the_readme_says_of_a_plan_with_bitwise_is_what_such_a_plan_is():
    (said,) = re.findall(
        r"With `--bitwise`, .* memfit would recompute activations only: ([\d.]+) times the time", README
    )
    plan = memfit.plan(ROOT / "examples/gpt.py", budget=5 << 30, bitwise=True)
    assert plan.chosen.change.plan.keys() == {"checkpointing"}
    assert f"{plan.chosen.time:.2f}" == said


def test_the_readme_says_with_which_option_its_six_peaks_were_run():
    rows = tomllib.loads((ROOT / "benchmarks/accuracy/rows.toml").read_text())["row"]
    exact = [row for row in rows if row["source"] == "checkpointing" and row["within"] == 0]
    (shown,) = re.findall(r"^\| two small networks: six peaks.*$", README, re.MULTILINE)
    assert len(exact) == 6
    assert {f"`{' '.join(row['options'])}`" for row in exact} == set(re.findall("`.*?`", shown))


def test_the_readme_is_about_a_hundred_lines():
    assert len(README.splitlines()) <= 125


@pytest.mark.process
def test_the_readme_s_python_runs(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
