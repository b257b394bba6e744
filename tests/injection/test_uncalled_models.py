"""A model is named if the script calls its layers, until the script calls the model itself."""

import copy

import torch
from torch import nn

from memfit.injection.uncalled_models import UncalledModels


def test_a_model_is_uncalled_from_the_call_of_a_layer_to_its_own():
    model, changes = nn.Sequential(nn.Linear(2, 2)), []
    uncalled, x = UncalledModels(lambda: changes.append(uncalled.names)), torch.ones(1, 2)
    uncalled.watch(model)
    with torch.no_grad():
        model[0](x)  # no gradient comes of it
    assert uncalled.names == ()
    copied = copy.deepcopy(model)
    model[0](x)
    assert uncalled.names == ("Sequential",)
    model(x)
    copied[0](x)
    copy.deepcopy(model)[0](x)
    model[0](x)
    assert changes == [("Sequential",), ()]
