"""The example notebook: its cells run without a GPU, but for the one that installs memfit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[1] / "examples/memfit.ipynb").read_text())


def cells():
    return ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.process
def test_the_cells_of_the_notebook_run(tmp_path):
    install, *rest = cells()
    assert install.startswith("%pip install")
    program = "\n".join([*rest, "print(result.verdict)\n"])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("fits\n")


def test_the_notebook_is_committed_without_output():
    assert not any(cell.get("outputs") for cell in NOTEBOOK["cells"])
