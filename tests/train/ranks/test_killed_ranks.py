"""Samples of `python benchmarks/ranks.py --only killed,nodes`, which kills more ranks, and machines."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def rows(section, arguments):
    """Return the rows of a section, from a process of its own: it forks, or starts torchrun."""
    script = f"from rank_tables import {section} as section\nfor row in section.rows({arguments}): print("
    script += "row.failure or row.cells)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=BENCHMARKS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_job_of_which_a_rank_was_killed_resumes_bit_for_bit():
    """The other rank says which one was killed."""
    (row,) = rows("killed", "2, (('fsdp2', 2),)")
    assert row.startswith("('fsdp2, 2 ranks', '2', ")
    assert row.endswith("equal')")


@pytest.mark.slow
def test_two_machines_train_as_one_with_as_many_ranks_bit_for_bit():
    one, two = rows("nodes", "1, kills=False")
    assert one == "('one machine, 2 ranks', '2', '0', '48', 'yes')"
    assert two == "('two machines, 1 rank each', '2', '0', '48', 'yes')"
