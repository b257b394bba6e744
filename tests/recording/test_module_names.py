"""Names of modules, on the CPU."""

import copy
import gc

import pytest
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from memfit.recording.module_names import ModuleNames


@pytest.fixture
def names():
    """Yield module names that learn of every registration, as in a recorder."""
    found = ModuleNames()
    handle = register_module_module_registration_hook(found.learn)
    yield found
    handle.remove()


def test_a_name_is_the_path_from_the_outermost_module(names):
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    assert names.full_name(net[0][0]) == "Sequential.0.0"
    assert names.outermost() == {net}


def test_copies_are_outermost_modules_with_the_same_names_below(names, monkeypatch):
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


def test_a_wrapper_has_the_name_of_the_module_it_wraps(names):
    fsdp = nn.ModuleDict({"_fsdp_wrapped_module": nn.Sequential(nn.Linear(2, 2))})
    compiled = nn.ModuleDict({"_orig_mod": fsdp})
    assert names.full_name(compiled["_orig_mod"]["_fsdp_wrapped_module"][0]) == "Sequential.0"
    assert {names.full_name(wrapper) for wrapper in (compiled, fsdp)} == {"Sequential"}


def test_a_data_parallel_over_one_gpu_has_no_part_in_the_names(names):
    """Scripts leave it out without a GPU: a plan must name the same modules."""
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    parallel = nn.DataParallel(net)
    assert names.full_name(parallel.module[0][0]) == "Sequential.0.0"
    assert names.outermost() == {net}
    parallel.device_ids = [0, 1]
    assert names.full_name(net[0][0]) == "DataParallel.module.0.0"
    assert names.outermost() == {parallel}


def test_a_module_at_the_address_of_a_deleted_one_does_not_inherit_its_name(names):
    nets = [nn.Sequential(nn.ReLU()) for _ in range(100)]
    addresses = {id(net[0]) for net in nets}
    del nets
    there = [each for each in [nn.ReLU() for _ in range(1000)] if id(each) in addresses]
    assert there
    assert {names.full_name(each) for each in there} == {"ReLU"}


def test_a_slice_of_a_module_list_does_not_rename_its_layers(names):
    net = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])})
    part = net["layers"][:1]  # a new module list, as the models of transformers make in each forward
    assert names.full_name(part[0]) == "ModuleDict.layers.0"
    del part
    gc.collect()
    assert names.full_name(net["layers"][0]) == "ModuleDict.layers.0"
    assert names.outermost() == {net}


def test_a_module_that_moved_has_the_name_of_its_new_place(names):
    net = nn.ModuleDict({"inner": nn.Sequential(nn.Linear(2, 2))})
    layer = net["inner"][0]
    wrapper = nn.Sequential(nn.Identity(), layer)
    net["inner"][0] = wrapper
    assert names.full_name(layer) == "ModuleDict.inner.0.1"
    net["inner"][0] = nn.Identity()
    assert names.full_name(layer) == "Sequential.1"
