"""What tensors are called, alone and in the same memory: on the CPU, where names are the same."""

import torch
from torch import nn

from memfit.recording.tensor_names import Name, Named, Names, describe
from memfit.records import TensorInfo


def named(module, *, suffix="", root="Net"):
    names = Names()
    tensors = names.learn(root, module.named_parameters(remove_duplicate=False))
    return [Named(one, names.of(one), suffix) for one in tensors]


def test_a_tensor_is_called_as_its_module_calls_it():
    weight, bias = named(nn.Sequential(nn.Linear(3, 2)))
    assert describe([weight]) == TensorInfo("Net.0", "weight", "float32", (2, 3))
    assert describe([bias]) == TensorInfo("Net.0", "bias", "float32", (2,))


def test_a_wrapped_module_goes_by_the_name_it_had():
    wrapper = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(3, 2)})
    weight, _ = named(nn.Sequential(wrapper))
    assert describe([weight]) == TensorInfo("Net.0", "weight", "float32", (2, 3))


def test_what_belongs_to_a_tensor_without_a_name_says_what_it_is():
    assert describe([Named(torch.zeros(3), Name(), ".grad")]) == TensorInfo("", "grad", "float32", (3,))


def test_tied_weights_go_by_all_of_their_names():
    tied = nn.ModuleDict({"emb": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    tied["head"].weight = tied["emb"].weight
    (weight,) = named(tied)
    assert describe([weight]).name == "weight = head.weight"
    (gradient,) = named(tied, suffix=".grad")
    assert describe([gradient]).name == "weight.grad = head.weight.grad"


def test_two_parameters_of_the_same_data_are_one():
    pair = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    pair[1].weight.data = pair[0].weight.data
    assert describe(named(pair)) == TensorInfo("Net.0", "weight = 1.weight", "float32", (3, 3))


def test_pieces_of_one_flat_tensor_are_counted():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    flat, begin = torch.zeros(20), 4
    for parameter in net.parameters():
        parameter.data = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    assert describe(named(net)) == TensorInfo("Net", "0.weight and 3 more", "float32", (begin - 4,))
    assert describe(named(net[1], root="Net.1")[::-1]) == TensorInfo(
        "Net.1", "bias and 1 more", "float32", (3,)
    )
    gradients = describe(named(net, suffix=".grad"))
    assert gradients.name == "0.weight.grad and 3 more"


def test_a_tensor_that_is_gone_leaves_no_name_to_the_next_of_its_address():
    names = Names()
    layer = nn.Linear(2, 2)
    names.learn("Net", layer.named_parameters())
    assert names.of(layer.weight) == Name("weight", "Net", ("weight",))
    assert names.of(torch.zeros(2)) == Name()
    weight = layer.weight
    names._names[id(layer.bias)] = names._names[id(weight)]  # as if its id had been another's
    assert names.of(layer.bias) == Name()
