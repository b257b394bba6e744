"""Which tensors are copies of the parameters of the models that run."""

from itertools import permutations

import pytest
import torch

from memfit.recording.parameter_copies import tensors_copying_parameters

FIRST, SECOND = [torch.ones(2, 3), torch.ones(2)], [torch.ones(2, 2), torch.ones(2)]
OTHER = torch.ones(7)


def of(found):
    return {id(one) for one in found}


@pytest.mark.parametrize("models", [*permutations([[*FIRST, *SECOND], FIRST, SECOND])])
def test_a_copy_is_found_whole_although_layers_of_the_model_have_also_run_by_themselves(models):
    copy = [one + 1 for one in (*FIRST, *SECOND)]
    assert of(tensors_copying_parameters(models, [OTHER, *copy])) == of(copy)


@pytest.mark.parametrize("models", [*permutations([FIRST, FIRST, [*SECOND, OTHER, OTHER]])])
def test_each_copy_is_found_once_and_a_part_of_a_copy_is_none(models):
    copy = [one + 1 for one in FIRST]
    found = list(tensors_copying_parameters(models, [OTHER + 1, SECOND[0] + 1, *copy]))
    assert of(found) == of(copy)
    assert len(found) == len(copy)
