"""Train scripts under a plan, on the CPU or in a rehearsal on the ghost."""

import json
import os
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from support import warm_process
from support.new_processes import run_python, start_ranks

ROOT = Path(__file__).parents[2]
CPU = Path(__file__).with_name("cpu")
REHEARSAL = ROOT / "benchmarks/gpu/rehearsal"
GPU = "A100-80GB"


@dataclass(frozen=True)
class Trained:
    """A process that has trained."""

    code: int
    out: str
    err: str
    digest: str
    """Of the parameters, at the end."""


@pytest.fixture
def python(tmp_path):
    """Return a function that runs Python in an empty folder; ``on`` says what stands in for a GPU."""

    def run(*arguments, on="cpu", start=run_python, **environment):
        digest = tmp_path / "digest"
        variables = variables_of(on, digest) | environment
        done = start(*arguments, cwd=tmp_path, **variables)
        found = digest.read_text() if digest.exists() else ""
        digest.unlink(missing_ok=True)
        return Trained(done.returncode, done.stdout, done.stderr, found)

    return run


@pytest.fixture
def plan_file(tmp_path):
    """Return a function that writes a plan file."""

    def write(settings, **fields):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps({"plan": settings, **fields}))
        return path

    return write


@pytest.fixture
def train(python, tmp_path):
    """Return a function that trains a script in the test's folder; on the CPU in a fork of a warm process."""

    def run(script, plan, *arguments, as_far=False, on="cpu", warm=True, **environment):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        command = ("--plan", plan, *["--as-far-as-it-goes"] * as_far, "script.py", *arguments)
        if on == "cpu" and warm:
            return python(*command, start=warm_process.train, **environment)
        return python("-m", "memfit", "train", *command, on=on, **environment)

    return run


@pytest.fixture
def train_on(tmp_path):
    """Return a function that trains a script as several ranks; the CPU or ghosts stand in for their GPUs."""

    def run(ranks, script, plan, *arguments, on="cpu", timeout=240):
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        command = ["--plan", plan, "script.py", *arguments]
        variables = variables_of(on, os.devnull)
        if on == "cpu":
            ended = warm_process.train_ranks(ranks, *command, cwd=tmp_path, seconds=timeout, **variables)
        else:
            ended = start_ranks(ranks, ["-m", "memfit", "train", *command], tmp_path, timeout, **variables)
        return [Trained(*each, "") for each in ended]

    return run


def variables_of(on, digest):
    """Return the environment in which the CPU or a ghost stands in for a GPU, or (``""``) nothing does."""
    folder = {"cpu": str(CPU), "ghost": str(REHEARSAL), "": ""}[on]
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    extra = {"MEMFIT_REHEARSAL": GPU} if on == "ghost" else {"MEMFIT_TEST_DIGEST": str(digest)}
    return {"PYTHONPATH": path, **extra}
