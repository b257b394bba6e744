"""Names of tensors, alone and sharing memory: on the CPU, where names are the same."""

import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from memfit.recording.tensor_names import (
    NamedTensor,
    TensorName,
    TensorNames,
    tensor_info_of_allocation,
    tensor_parts_by_role,
)
from memfit.records import TensorInfo


def named(module, *, suffix="", root="Net"):
    names = TensorNames()
    tensors = names.learn(root, module.named_parameters(remove_duplicate=False))
    return [NamedTensor(tensor, names.of(tensor), suffix) for tensor in tensors]


def test_a_tensor_has_its_name_in_its_module():
    weight, bias = named(nn.Sequential(nn.Linear(3, 2)))
    assert tensor_info_of_allocation([weight]) == TensorInfo("Net.0", "weight", "float32", (2, 3))
    assert tensor_info_of_allocation([bias]) == TensorInfo("Net.0", "bias", "float32", (2,))


def test_wrappers_are_left_out_of_names():
    wrapper = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(3, 2)})
    weight, _ = named(nn.Sequential(wrapper))
    assert tensor_info_of_allocation([weight]) == TensorInfo("Net.0", "weight", "float32", (2, 3))


def test_the_gradient_of_an_unnamed_tensor_is_named_grad():
    assert tensor_info_of_allocation([NamedTensor(torch.zeros(3), TensorName(), ".grad")]) == TensorInfo(
        "", "grad", "float32", (3,)
    )


class Quantised(nn.Parameter):
    """A parameter with its scales beside it, as bitsandbytes keeps them."""


def test_the_scales_of_a_quantised_parameter_are_parts_of_it():
    class State:
        def __init__(self, absmax, inner=None):
            self.absmax, self.code, self.state2 = absmax, torch.zeros(16), inner

    weight = Quantised(torch.zeros(8))
    weight.quant_state = State(torch.zeros(4), State(torch.zeros(2)))
    weight.SCB = torch.zeros(3)
    assert {name: tuple(part.shape) for name, part in tensor_parts_by_role(weight)} == {
        "": (8,),
        "SCB": (3,),
        "quant_state.absmax": (4,),
        "quant_state.code": (16,),
        "quant_state.state2.absmax": (2,),
        "quant_state.state2.code": (16,),
    }


def test_the_tensors_in_a_wrapper_are_its_parts():
    both = TwoTensor(torch.zeros(2), TwoTensor(torch.zeros(2), torch.eye(2)[0]))
    assert [name for name, _ in tensor_parts_by_role(both)] == ["", "a", "b", "b.a", "b.b"]


def test_tied_weights_have_all_of_their_names():
    tied = nn.ModuleDict({"emb": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    tied["head"].weight = tied["emb"].weight
    (weight,) = named(tied)
    assert tensor_info_of_allocation([weight]).name == "weight = head.weight"
    (gradient,) = named(tied, suffix=".grad")
    assert tensor_info_of_allocation([gradient]).name == "weight.grad = head.weight.grad"


def test_parameters_with_the_same_data_are_described_as_one():
    pair = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    pair[1].weight.data = pair[0].weight.data
    assert tensor_info_of_allocation(named(pair)) == TensorInfo(
        "Net.0", "weight = 1.weight", "float32", (3, 3)
    )


def test_pieces_of_one_flat_tensor_are_counted():
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    flat, begin = torch.zeros(20), 4
    for parameter in net.parameters():
        parameter.data = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    assert tensor_info_of_allocation(named(net)) == TensorInfo(
        "Net", "0.weight and 3 more", "float32", (begin - 4,)
    )
    assert tensor_info_of_allocation(named(net[1], root="Net.1")[::-1]) == TensorInfo(
        "Net.1", "bias and 1 more", "float32", (3,)
    )
    gradients = tensor_info_of_allocation(named(net, suffix=".grad"))
    assert gradients.name == "0.weight.grad and 3 more"


def test_a_tensor_at_the_address_of_a_deleted_one_does_not_inherit_its_name():
    names = TensorNames()
    layer = nn.Linear(2, 2)
    names.learn("Net", layer.named_parameters())
    assert names.of(layer.weight) == TensorName("weight", "Net", ("weight",))
    assert names.of(torch.zeros(2)) == TensorName()
    weight = layer.weight
    names._names[id(layer.bias)] = names._names[id(weight)]  # as if they had the same id
    assert names.of(layer.bias) == TensorName()
