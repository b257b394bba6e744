"""Scripts in examples/ that train with memfit reach the accuracy they claim, on the CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[1] / "examples"
UNSEEN = 360
"""Digits in the test set."""


def test_accumulated_batches_of_digits_reach_the_same_accuracy():
    """As MindSpore's tutorial does with LeNet-5 and MNIST, which reaches 96.31 %."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "digits.py", "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # threads slow down so small a model
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^batches of (.+?) +(\d+) updates +accuracy ([\d.]+)$", done.stdout, re.MULTILINE)
    assert [(name, updates) for name, updates, _ in found] == [("32", "180"), ("4 x 8", "180")]
    whole, accumulated = (float(accuracy) for *_, accuracy in found)
    assert min(whole, accumulated) >= 0.95
    assert abs(whole - accumulated) <= 2 / UNSEEN  # sums in another order may flip a digit
