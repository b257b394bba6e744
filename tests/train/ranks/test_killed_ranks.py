"""A rank, or a machine, is killed: the others say which, and the job resumes from its last save.

MEMFIT_TIMES=8 kills eight times as many ranks, of every kind of job, and a machine, too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]
TESTS = Path(__file__).parents[2]
TIMES = int(os.environ.get("MEMFIT_TIMES", "1"))
JOBS = (
    [(mode, ranks) for mode in ("ddp", "zero1", "fsdp2") for ranks in (2, 4)] if TIMES > 1 else [("fsdp2", 2)]
)


def rows(module, arguments):
    """Return the rows of a module, from a process of its own: it forks, or starts torchrun."""
    script = f"from support import {module}\nfor row in {module}.rows({arguments}): print("
    script += "row.failure or row.cells)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=TESTS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.timeout(300 * TIMES)
@pytest.mark.parametrize(("mode", "ranks"), JOBS)
def test_a_job_of_which_a_rank_was_killed_resumes_bit_for_bit(mode, ranks):
    """The other ranks say which one was killed."""
    (row,) = rows("killed_ranks", f"{2 * TIMES}, (('{mode}', {ranks}),)")
    assert row.startswith(f"('{mode}, {ranks} ranks', '{2 * TIMES}', ")
    assert row.endswith("equal')")


def test_two_machines_train_as_one_with_as_many_ranks_bit_for_bit():
    one, two = rows("two_machines", "1, kills=False")
    assert one == "('one machine, 2 ranks', '2', '0', '48', 'yes')"
    assert two == "('two machines, 1 rank each', '2', '0', '48', 'yes')"


@pytest.mark.skipif(TIMES == 1, reason="MEMFIT_TIMES=2 asks for killed machines")
@pytest.mark.timeout(900)
def test_a_job_of_which_a_machine_was_killed_goes_on_with_it_or_without():
    found = rows("two_machines", "2")
    assert len(found) == 4
    for row in found:
        assert row.startswith("('"), row
