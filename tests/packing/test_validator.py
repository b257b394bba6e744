"""The validator: it accepts what is right and names what is wrong."""

import numpy as np
import pytest

from memfit.packing.best_packing import pack
from memfit.packing.buffers import Buffers
from memfit.packing.validator import wrong
from support.known_packings import cut

TWO = Buffers(np.array([0, 2]), np.array([3, 5]), np.array([4, 4]), ("a", "b"))


@pytest.mark.parametrize(
    ("offsets", "capacity", "said"),
    [
        ([0, 4], 8, ""),
        ([4, 0], 8, ""),
        ([0, 3], 8, "b [2, 5) and a [0, 3) meet"),
        ([0, 0], 8, "b [2, 5) and a [0, 3) meet"),
        ([3, 0], 8, "b [2, 5) and a [0, 3) meet"),
        ([0, 5], 8, "b [2, 5) ends beyond the capacity"),
        ([-1, 4], 8, "a [0, 3) lies below 0"),
        ([0], 8, "1 offsets for 2 buffers"),
    ],
)
def test_what_it_says(offsets, capacity, said):
    assert wrong(TWO, np.array(offsets), capacity) == said


def test_lives_that_only_touch_do_not_meet():
    touching = Buffers(np.array([0, 3]), np.array([3, 5]), np.array([4, 4]), ("a", "b"))
    assert wrong(touching, np.array([0, 0]), 4) == ""


def test_a_packing_moved_anywhere_is_wrong():
    problem = cut(2, 60)
    right = pack(problem, seconds=60).offset
    assert wrong(problem, right, 10_000) == ""
    for index in range(60):
        for by in (-1, 1):
            moved = right.copy()
            moved[index] += by
            assert wrong(problem, moved, 10_000)  # no gap anywhere: whatever moves meets something
