"""Run scripts that call ``memfit.watch()`` as on a GPU, with the ghost in its place."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REHEARSAL = Path(__file__).parents[2] / "benchmarks/gpu/rehearsal"


@pytest.fixture
def rehearse(tmp_path):
    """Return a function that runs a script in an empty folder and returns the completed process."""

    def run(script, **environment):
        path = os.pathsep.join(filter(None, (str(REHEARSAL), os.environ.get("PYTHONPATH"))))
        (tmp_path / "script.py").write_text(textwrap.dedent(script))
        return subprocess.run(
            [sys.executable, "script.py"],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            timeout=120,
            env={**os.environ, "PYTHONPATH": path, "MEMFIT_REHEARSAL": "A100-80GB", **environment},
        )

    return run
