"""What modules are called, on the CPU."""

import copy
import gc

import pytest
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from memfit.recording.module_names import ModuleNames


@pytest.fixture
def names():
    """Return names that see modules being registered, as a recorder's do."""
    found = ModuleNames()
    handle = register_module_module_registration_hook(found.learn)
    yield found
    handle.remove()


def test_the_path_from_the_outermost_module(names):
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert names.full_name(net[0][0]) == "Sequential.0.0"
    assert names.outermost() == {net}


def test_a_copy_is_another_module_with_parts_of_the_same_names(names, monkeypatch):
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    original = nn.Module.__setstate__

    def set_state(module, state):
        original(module, state)
        names.learn_copy(module)

    monkeypatch.setattr(nn.Module, "__setstate__", set_state)
    twin, layer = copy.deepcopy(net), copy.deepcopy(net[0][0])
    assert names.outermost() == {net, twin, layer}
    assert names.full_name(twin[0][0]) == "Sequential.0.0"
    del net
    gc.collect()
    assert names.outermost() == {twin, layer}


def test_a_wrapper_goes_by_the_name_of_what_it_wraps(names):
    fsdp = nn.ModuleDict({"_fsdp_wrapped_module": nn.Sequential(nn.Linear(2, 2))})
    compiled = nn.ModuleDict({"_orig_mod": fsdp})
    assert names.full_name(compiled["_orig_mod"]["_fsdp_wrapped_module"][0]) == "Sequential.0"
    assert {names.full_name(one) for one in (compiled, fsdp)} == {"Sequential"}


def test_a_module_that_lies_where_another_was_has_not_its_name(names):
    net = nn.Sequential(nn.Linear(2, 2))
    stranger = nn.ReLU()
    names._parents[id(stranger)] = names._parents[id(net[0])]  # as if it lay where the linear layer was
    assert names.full_name(stranger) == "ReLU"
