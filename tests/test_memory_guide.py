"""docs/memory.md: each of its commands prints the lines that the guide shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = (Path(__file__).parents[1] / "docs" / "memory.md").read_text()
SCRIPTS = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", GUIDE, re.DOTALL))
SHOWN = re.findall(r"```console\n\$ (.*?)\n(.*?)```", GUIDE, re.DOTALL)


def run(command, folder):
    """Run a command of the guide as a shell would; return its lines of standard output."""
    for name, body in SCRIPTS.items():
        (folder / name).write_text(f"# {name}\n{body}")
    words = command.split()
    settings = [word for word in words if re.match(r"[A-Z_]+=", word)]
    memfit, *arguments = words[len(settings) :]
    assert memfit == "memfit"
    done = subprocess.run(
        [sys.executable, "-m", "memfit", *arguments],
        env={**os.environ, **dict(setting.split("=", 1) for setting in settings)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.rstrip() for line in done.stdout.splitlines()]


def missing(shown, printed):
    """Return the shown lines that were not printed in this order; `...` stands for any lines."""
    left = iter(printed)
    lines = [line for line in shown.splitlines() if line != "..."]
    return [line for line in lines if not any(line == found for found in left)]


@pytest.mark.process
@pytest.mark.parametrize(("command", "shown"), SHOWN, ids=[command for command, _ in SHOWN])
def test_the_guide_shows_what_the_command_prints(command, shown, tmp_path):
    printed = run(command, tmp_path)
    assert not missing(shown, printed), "\n".join(printed)


def test_nothing_in_the_guide_goes_unchecked():
    assert set(SCRIPTS) == {"blocks.py", "train.py"}
    assert len(SHOWN) == GUIDE.count("```console") == GUIDE.count("$ ")
    assert all(len(shown.splitlines()) > 1 for _, shown in SHOWN)


def test_a_line_that_was_not_printed_is_found():
    assert missing("a\n...\nc\n", ["a", "b", "c"]) == []
    assert missing("a\nc\n", ["c", "a"]) == ["c"]
    assert missing("a 1\n", ["a 2"]) == ["a 1"]
