"""Whether micro-batches have the samples of the batches that they divide."""

import pytest
import torch

from memfit.planning.sample_independence import (
    SampleComparison,
    compare_step_inputs,
    compare_steps_of_parts,
    find_undivided_tensor,
)
from memfit.recording.model_input_digests import digest_tensor_rows
from memfit.records import InputTensor, StepInputs, StepOperations

DATA = torch.arange(4 * 6 * 3, dtype=torch.float32).reshape(4, 6, 3)


def fed(*tensors):
    return tuple(map(digest_tensor_rows, tensors))


def parts_of(tensor, count, dimension=0):
    return tensor.chunk(count, dimension)


def compare(whole, parts, count=2, **other):
    return compare_step_inputs(StepInputs(fed(*whole)), StepInputs(fed(*parts), **other), count)


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("count", [2, 3, 6])
def test_rows_along_either_of_two_dimensions_may_be_the_samples(dimension, count):
    if DATA.shape[dimension] % count:
        return
    found = compare([DATA], parts_of(DATA, count, dimension), count)
    assert (found.why, found.assumed) == ("", "")


def test_batches_follow_each_other_and_have_several_tensors_of_one_shape():
    """As the inputs and targets of a language model; a loader may be a batch ahead."""
    inputs, targets = DATA, DATA + 1
    whole = [each for pair in zip(inputs.split(2), targets.split(2), strict=True) for each in pair]
    parts = [each for pair in zip(inputs.split(1), targets.split(1), strict=True) for each in pair]
    assert compare(whole, parts) == SampleComparison()
    assert compare(whole[:2], parts) == SampleComparison()
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
    assert "the script makes other rows" in found.why
    assert found.why.endswith("(seen in float32, 4 x 6 x 3)")


def test_what_is_the_same_in_each_part_proves_nothing():
    mask = torch.ones(5, 5).tril()
    found = compare([mask, mask], [mask, mask, mask])
    assert found.why == ""
    assert "the GPU makes what the model is passed" in found.assumed
    assert compare([mask, DATA], [mask, *parts_of(DATA, 2)]) == SampleComparison()
    assert compare([mask], [mask * 2]).why  # drawn anew for each part


def test_nothing_that_memfit_can_see_is_assumed():
    assert "the GPU makes" in compare_step_inputs(StepInputs(), StepInputs(), 2).assumed


def test_what_the_gpu_has_computed_of_the_samples_is_assumed():
    """It may have mixed them with each other."""
    whole, parts = StepInputs(fed(DATA), computed=True), StepInputs(fed(*parts_of(DATA, 2)), computed=True)
    assert "the GPU makes" in compare_step_inputs(whole, parts, 2).assumed


def test_parts_of_what_is_on_the_gpu_already_are_compared_too():
    corpus = torch.arange(64)
    on_gpu = fed(corpus)
    whole = StepInputs(on_gpu, fed(*corpus.reshape(4, 16)[:2].split(2)))
    parts = StepInputs(on_gpu, fed(*corpus.reshape(4, 16)[:2].split(1)))
    assert compare_step_inputs(whole, parts, 2) == SampleComparison()
    other = StepInputs(on_gpu, fed(*corpus.reshape(4, 16)[2:].split(1)))
    assert compare_step_inputs(whole, other, 2).why


def test_where_a_loader_draws_the_same_samples_other_contents_are_assumed_to_be_theirs():
    """Augmented images differ, and so does what a collator pads to the longest of a batch."""
    augmented = fed(*(each * 2 for each in parts_of(DATA, 2)))
    whole = StepInputs(fed(DATA), drawn=((tuple("3102"),),))
    for drawn, why, assumed in (
        (((("3", "1"), ("0", "2"), ("7", "5")),), "", "augmented at random, padded to another length"),
        (((("3", "1"),),), "", "augmented at random, padded to another length"),
        (((("3", "1"), ("2", "0")),), "with smaller batches, its DataLoader draws other samples", ""),
        ((tuple("3102"),), "the script makes other rows", ""),  # a batch of one "sample" that is a batch
    ):
        found = compare_step_inputs(whole, StepInputs(augmented, drawn=drawn), 2)
        assert why in found.why
        assert assumed in found.assumed
        assert bool(found.why) is not bool(found.assumed)
    same = StepInputs(fed(*parts_of(DATA, 2)), drawn=((("3", "1"), ("0", "2")),))
    assert compare_step_inputs(whole, same, 2) == SampleComparison()


def test_what_only_one_step_shows_is_assumed():
    whole, parts = StepInputs(fed(DATA)), StepInputs(fed(*DATA.chunk(2)))
    for carried, assumed in (((), ""), (None, "it recorded one step")):
        steps = [StepOperations((), (), (), (), samples=each, carried=carried) for each in (whole, parts)]
        found = compare_steps_of_parts(*steps, 2)
        assert assumed in found.assumed
        assert bool(found.assumed) is bool(assumed)


def test_a_script_run_twice_must_feed_the_same():
    assert find_undivided_tensor(fed(DATA, DATA), fed(DATA, DATA), 1) is True
    assert isinstance(find_undivided_tensor(fed(DATA), fed(DATA + 1), 1), InputTensor)
