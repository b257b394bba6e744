"""Batches of every kind, in parts."""

from typing import NamedTuple

import pytest
import torch

from memfit.errors import UsageError
from memfit.train.split import batch_size, even_sizes, split


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


X, Y = torch.arange(10).reshape(5, 2), torch.arange(5)


@pytest.mark.parametrize(
    "batch",
    [
        X,
        (X, Y),
        [X, Y],
        {"x": X, "y": Y},
        Pair(X, Y),
        {"x": X, "more": (Y, {"z": X})},
        {"x": X, "epoch": 3, "scale": torch.tensor(2.0), "name": "train"},
        {"x": X, "text": ["a", "b", "c", "d", "e"]},
    ],
)
def test_every_kind(batch):
    assert batch_size(batch) == 5
    parts = split(batch, [2, 2, 1])
    assert [batch_size(part) for part in parts] == [2, 2, 1]
    assert all(type(part) is type(batch) for part in parts)


def test_samples_of_many_lengths():
    samples = [torch.zeros(length) for length in (3, 1, 2, 5, 4)]
    assert batch_size(samples) == 5
    parts = split(samples, [2, 3])
    assert [[len(sample) for sample in part] for part in parts] == [[3, 1], [2, 5, 4]]


def test_what_is_no_sample_goes_to_every_part():
    scale = torch.tensor(2.0)
    parts = split({"x": X, "epoch": 3, "scale": scale}, [4, 1])
    assert [(part["epoch"], part["scale"] is scale) for part in parts] == [(3, True)] * 2
    assert torch.equal(torch.cat([part["x"] for part in parts]), X)


@pytest.mark.parametrize(
    ("batch", "words"),
    [({"epoch": 3}, "nothing that has samples"), ((X, torch.zeros(4)), r"parts of \[4, 5\] samples")],
)
def test_a_size_that_cannot_be_told(batch, words):
    with pytest.raises(UsageError, match=words):
        batch_size(batch)


@pytest.mark.parametrize("samples", range(1, 20))
@pytest.mark.parametrize("parts", range(1, 8))
def test_sizes_differ_by_one_at_most(samples, parts):
    sizes = even_sizes(samples, parts)
    assert sum(sizes) == samples
    assert len(sizes) == min(samples, parts)
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0
