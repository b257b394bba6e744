"""Run memfit's commands as on a real card, with the ghost in place of the card."""

import json
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.new_processes import run_python

REHEARSAL = Path(__file__).parents[2] / "benchmarks/gpu/rehearsal"
GPU = "A100-80GB"


@dataclass(frozen=True)
class Rehearsed:
    """Result of one command."""

    code: int
    out: str
    err: str
    answer: dict | None


@pytest.fixture
def memfit(tmp_path):
    """Return a function that runs a memfit command in an empty folder, with the ghost in place of a card."""

    def run(*arguments, card=GPU, **environment):
        path = os.pathsep.join(filter(None, (str(REHEARSAL), os.environ.get("PYTHONPATH"))))
        rehearsal = {"PYTHONPATH": path, "MEMFIT_REHEARSAL": card} if card else {}
        done = run_python("-m", "memfit", *arguments, cwd=tmp_path, timeout=120, **rehearsal, **environment)
        answer = tmp_path / "answer.json"
        found = json.loads(answer.read_text()) if answer.exists() else None
        answer.unlink(missing_ok=True)
        return Rehearsed(done.returncode, done.stdout, done.stderr, found)

    return run


@pytest.fixture
def record(memfit, tmp_path):
    """Return a function that writes a script and records it; options of memfit come first."""

    def run(script, *options, **environment):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        return memfit("record", "--json", "answer.json", *options, "script.py", **environment)

    return run
