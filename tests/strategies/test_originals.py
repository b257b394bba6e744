"""Settings of other systems against these systems themselves: equal bit for bit, or with the reason."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

REPORT = Path(__file__).parents[1] / "support" / "originals" / "report.py"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "originals-torch-2.14.1.md"


def cells(text):
    """Return the settings, interface, training and updates of each row of a table."""
    return [line.split(" | ")[:4] for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize(
    ("package", "rows"), [("mmengine", 16), ("lightning", 15), ("transformers", 13), ("accelerate", 9)]
)
def test_memfit_trains_as_the_original_does_under_the_same_settings(package, rows):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    done = subprocess.run([sys.executable, REPORT, package], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = cells(done.stdout)
    assert len(found) == rows
    recorded = cells(RESULTS.read_text(encoding="utf-8"))
    assert [row for row in found if row not in recorded] == []
