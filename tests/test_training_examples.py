"""Scripts in examples/ that train with memfit reach the accuracy they claim, on the CPU."""

import re
from pathlib import Path

import pytest

from support.new_processes import run_python

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[1] / "examples"
UNSEEN = 360
"""Digits in the test set."""


def run(*command):
    """Run Python, and return what it prints."""
    done = run_python(*command, OMP_NUM_THREADS="1")  # threads slow down so small a model
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_accumulated_batches_of_digits_reach_the_same_accuracy():
    """As MindSpore's tutorial does with LeNet-5 and MNIST, which reaches 96.31 %."""
    printed = run(EXAMPLES / "digits.py", "--device", "cpu")
    found = re.findall(r"^batches of (.+?) +(\d+) updates +accuracy ([\d.]+)$", printed, re.MULTILINE)
    assert [(name, updates) for name, updates, _ in found] == [("32", "180"), ("4 x 8", "180")]
    whole, accumulated = (float(accuracy) for *_, accuracy in found)
    assert min(whole, accumulated) >= 0.95
    assert abs(whole - accumulated) <= 2 / UNSEEN  # sums in another order may flip a digit


@pytest.mark.slow
def test_two_ranks_with_three_micro_batches_train_as_one_process_with_six():
    script = EXAMPLES / "distributed" / "digits.py"
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    alone, together = (run(*command, script, "--epochs", "2") for command in ((), launch))
    line = r"^(\d x \d) micro-batches +(\d+) updates +last loss ([\d.]+) +accuracy ([\d.]+)$"
    (one,), (two,) = (re.findall(line, printed, re.MULTILINE) for printed in (alone, together))
    assert (one[:2], two[:2]) == (("1 x 6", "58"), ("2 x 3", "58"))
    # Adam magnifies the rounding of sums in another order; tests/train/ranks compares LeNet-5 to 1e-12.
    assert float(one[2]) == pytest.approx(float(two[2]), rel=1e-3)
    assert one[3] == two[3]
    assert float(one[3]) >= 0.9
