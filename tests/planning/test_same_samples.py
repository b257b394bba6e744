"""Whether micro-batches have the samples of the batches that they divide."""

import pytest
import torch

from memfit.planning.same_samples import compare_samples, other_rows
from memfit.recording.fed_samples import fed_tensor
from memfit.records import FedSamples, FedTensor

DATA = torch.arange(4 * 6 * 3, dtype=torch.float32).reshape(4, 6, 3)


def fed(*tensors):
    return tuple(map(fed_tensor, tensors))


def parts_of(tensor, count, dimension=0):
    return tensor.chunk(count, dimension)


def compare(whole, parts, count=2, **other):
    return compare_samples(FedSamples(fed(*whole)), FedSamples(fed(*parts), **other), count)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_rows_along_either_of_two_dimensions_may_be_the_samples(dimension, count):
    if DATA.shape[dimension] % count:
        return
    found = compare([DATA], parts_of(DATA, count, dimension), count)
    assert (found.why, found.seen, found.draws) == ("", True, False)


def test_batches_follow_each_other_and_have_several_tensors_of_one_shape():
    """As the inputs and targets of a language model; a loader may be a batch ahead."""
    inputs, targets = DATA, DATA + 1
    whole = [each for pair in zip(inputs.split(2), targets.split(2), strict=True) for each in pair]
    parts = [each for pair in zip(inputs.split(1), targets.split(1), strict=True) for each in pair]
    assert compare(whole, parts).seen
    assert compare(whole[:2], parts).seen
    assert compare(whole, parts[::-1]).why


@pytest.mark.parametrize(
    "parts",
    [
        parts_of(DATA.flip(0), 2),
        parts_of(DATA, 2)[::-1],
        [DATA.reshape(8, 3, 3)],  # a corpus that is cut by the batch size
        [],
    ],
    ids=["reversed", "another order", "cut", "nothing"],
)
def test_other_rows_are_named(parts):
    found = compare([DATA], parts)
    assert "other rows than the whole batch" in found.why
    assert found.why.endswith("(seen in float32, 4 x 6 x 3)")


def test_what_is_the_same_in_each_part_proves_nothing():
    mask = torch.ones(5, 5).tril()
    found = compare([mask, mask], [mask, mask, mask])
    assert (found.why, found.seen) == ("", False)
    assert compare([mask, DATA], [mask, *parts_of(DATA, 2)]).seen
    assert compare([mask], [mask * 2]).why  # drawn anew for each part


def test_nothing_that_memfit_can_see_is_assumed():
    assert compare_samples(FedSamples(), FedSamples(), 2).seen is False


def test_parts_of_what_is_on_the_gpu_already_are_compared_too():
    corpus = torch.arange(64)
    on_gpu = fed(corpus)
    whole = FedSamples(on_gpu, fed(*corpus.reshape(4, 16)[:2].split(2)))
    assert compare_samples(whole, FedSamples(on_gpu, fed(*corpus.reshape(4, 16)[:2].split(1))), 2).seen
    other = FedSamples(on_gpu, fed(*corpus.reshape(4, 16)[2:].split(1)))
    assert compare_samples(whole, other, 2).why


def test_a_loader_s_indices_decide_where_contents_are_drawn_at_random():
    """Augmented images differ, and so does what a collator pads to the longest of a batch."""
    augmented = [each * 2 for each in parts_of(DATA, 2)]
    whole = FedSamples(fed(DATA), drawn=(("3", "1", "0", "2"),))
    for drawn, why, draws in (
        ((("3", "1", "0", "2", "7"),), "", True),
        ((("3", "1"),), "", True),
        ((("3", "1", "2", "0"),), "with smaller batches, its DataLoader draws other samples", False),
    ):
        found = compare_samples(whole, FedSamples(fed(*augmented), drawn=drawn), 2)
        assert (found.why, found.draws) == (why, draws)
    same = compare_samples(whole, FedSamples(fed(*parts_of(DATA, 2)), drawn=whole.drawn), 2)
    assert (same.why, same.seen, same.draws) == ("", True, False)


def test_state_that_goes_from_step_to_step_is_refused():
    whole = FedSamples(fed(DATA), carried=True)
    assert "goes on from what it returned" in compare_samples(whole, FedSamples(fed(*DATA.chunk(2))), 2).why


def test_a_script_run_twice_must_feed_the_same():
    assert other_rows(fed(DATA, DATA), fed(DATA, DATA), 1) is True
    assert isinstance(other_rows(fed(DATA), fed(DATA + 1), 1), FedTensor)
