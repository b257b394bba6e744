"""Sizes of batches, and which batches of a pass are kept."""

from collections import UserDict
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memfit.recording.loader_scan import (
    DrawnBatch,
    SampledBatches,
    measure_drawn_batch,
    only_dimension_that_differs,
)
from memfit.records import BatchSize


class Graph:
    def __init__(self):
        self.store = {"x": torch.zeros(3, 4), "edges": [torch.zeros(2, 7, dtype=torch.int64)]}


@dataclass(slots=True)
class Slots:
    tokens: torch.Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.int8))


@pytest.mark.parametrize(
    ("batch", "size", "shapes"),
    [
        (torch.zeros(2, 3), 24, ((2, 3),)),
        ({"ids": torch.zeros(2, 9, dtype=torch.int64), "text": "abc"}, 144, ((2, 9),)),
        (UserDict(ids=torch.zeros(4)), 16, ((4,),)),  # as transformers' BatchEncoding
        ((torch.zeros(1), [np.zeros((2, 2)), 7, None]), 36, ((1,), (2, 2))),
        (Graph(), 48 + 112, ((3, 4), (2, 7))),
        (Slots(), 5, ((5,),)),
        ("text", 0, ()),
    ],
)
def test_a_batch_has_the_bytes_of_all_tensors_in_it(batch, size, shapes):
    assert (measure_drawn_batch(batch).bytes, measure_drawn_batch(batch).shapes) == (size, shapes)


def sample_of(sizes):
    sample = SampledBatches()
    for number, size in enumerate(sizes):
        sample.add(DrawnBatch(number, size, ((size,),)))
    return sample


@given(st.lists(st.integers(0, 50), min_size=1, max_size=200))
def test_the_largest_is_chosen_first_and_sizes_are_those_of_the_pass(sizes):
    sample = sample_of(sizes)
    chosen = sample.chosen()
    largest, median, *served = sample.describe(chosen)
    assert (largest.bytes, median.bytes) == (max(sizes), sorted(sizes)[len(sizes) // 2])
    assert bool(chosen) == (largest.bytes > median.bytes)
    assert [each.bytes for each in served] == [sizes[each.batch] for each in chosen]
    assert len(chosen) <= 3
    if chosen:
        assert served[0] == largest
        assert all(served[1].bytes < each.bytes < largest.bytes for each in served[2:])


def test_of_a_long_pass_a_few_batches_are_kept():
    sizes = [100 + number % 10 for number in range(10_000)]
    sizes[5_000], sizes[7_001] = 900, 500
    sample = sample_of(sizes)
    largest, near, between = sample.chosen()
    assert (largest.batch, between.batch) == (5_000, 7_001)
    assert 100 <= near.bytes <= 109
    assert len(sample._spread) + len(sample._largest) <= 12


def test_the_shape_is_that_of_the_tensor_that_differs():
    sample = SampledBatches()
    for length in (5, 5, 80):
        sample.add(measure_drawn_batch({"image": torch.zeros(2, 100), "tokens": torch.zeros(2, length)}))
    chosen = sample.chosen()
    largest, median, *_ = sample.describe(chosen)
    assert (largest.shape, median.shape) == ((2, 80), (2, 5))
    assert only_dimension_that_differs(largest, median) == 1
    assert only_dimension_that_differs(largest, BatchSize(1, (1, 5))) is None
    assert only_dimension_that_differs(largest, BatchSize(1, ())) is None
