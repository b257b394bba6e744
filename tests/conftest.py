"""Shared fixtures: a dry run of a short script, and its result."""

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class DryRunOutput:
    """Result of one `memfit dry-run`."""

    code: int
    out: str
    err: str
    answer: dict | None
    folder: Path


@pytest.fixture
def dry_run(tmp_path):
    """Return a function that writes a script, runs `memfit dry-run` on it, and reads the JSON."""

    def run(script, *arguments, options=(), json_answer=True, **popen):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        answer = tmp_path / "answer.json"
        answer.unlink(missing_ok=True)
        json_options = ("--json", str(answer)) if json_answer else ()
        done = subprocess.run(
            [sys.executable, "-m", "memfit", "dry-run", *json_options, *options, "script.py", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
            timeout=120,
            **popen,
        )
        found = json.loads(answer.read_text()) if answer.exists() else None
        return DryRunOutput(done.returncode, done.stdout, done.stderr, found, tmp_path)

    return run
