"""The validator accepts valid packings and describes violations."""

import numpy as np
import pytest

from memfit.packing.best_packing import pack_buffers
from memfit.packing.buffer_lifetimes import Buffers
from memfit.packing.packing_violations import find_packing_violation
from support.known_packings import gapless_problem

TWO = Buffers(np.array([0, 2]), np.array([3, 5]), np.array([4, 4]), ("a", "b"))


@pytest.mark.parametrize(
    ("offsets", "capacity", "violation"),
    [
        ([0, 4], 8, ""),
        ([4, 0], 8, ""),
        ([0, 3], 8, "b [2, 5) and a [0, 3) overlap"),
        ([0, 0], 8, "b [2, 5) and a [0, 3) overlap"),
        ([3, 0], 8, "b [2, 5) and a [0, 3) overlap"),
        ([0, 5], 8, "b [2, 5) ends beyond the capacity"),
        ([-1, 4], 8, "a [0, 3) begins below 0"),
        ([0], 8, "1 offsets for 2 buffers"),
    ],
)
def test_the_violation_is_described(offsets, capacity, violation):
    assert find_packing_violation(TWO, np.array(offsets), capacity) == violation


def test_lifetimes_that_only_touch_do_not_overlap():
    touching = Buffers(np.array([0, 3]), np.array([3, 5]), np.array([4, 4]), ("a", "b"))
    assert find_packing_violation(touching, np.array([0, 0]), 4) == ""


def test_moving_any_buffer_of_a_gapless_packing_is_a_violation():
    problem = gapless_problem(2, 60)
    valid = pack_buffers(problem, seconds=60).offset
    assert find_packing_violation(problem, valid, 10_000) == ""
    for index in range(60):
        for shift in (-1, 1):
            moved = valid.copy()
            moved[index] += shift
            assert find_packing_violation(problem, moved, 10_000)
