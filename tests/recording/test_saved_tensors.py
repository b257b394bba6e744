"""Tensors that autograd saves for the backward: on the CPU, where the graph is the same."""

from dataclasses import make_dataclass

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.recording.label_running_modules import tensors_in_containers
from memfit.recording.saved_tensors import autograd_nodes_of_tensors, tensors_saved_by_node


def saved(*roots):
    return [saved for node in autograd_nodes_of_tensors(roots) for saved in tensors_saved_by_node(node)]


def storages(found):
    return {info.tensor.untyped_storage().data_ptr() for info in found}


def storages_seen_by_hooks(compute):
    """Return the result of a computation, and the storages that saved-tensor hooks see during it."""
    seen = []

    def pack(tensor):
        seen.append(tensor.detach())
        return seen[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        root = compute()
    return root, {tensor.untyped_storage().data_ptr() for tensor in seen}


NETS = {
    "perceptron": lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(), nn.Linear(8, 2)),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU()
    ),
    "recurrent": lambda: nn.LSTM(4, 3),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
}


@pytest.mark.parametrize("name", NETS)
def test_the_saved_tensors_are_those_that_saved_tensor_hooks_see(name):
    torch.manual_seed(0)
    net, x = NETS[name](), torch.randn(5, 4)
    if name == "attention":
        x = x[None]

    def compute():
        out = net(x)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    root, seen = storages_seen_by_hooks(compute)
    assert storages(saved(root)) == seen


def test_the_producing_op_and_the_saving_node_are_named():
    x = torch.randn(3, 4, requires_grad=True)
    layer = nn.Linear(4, 2)
    found = {info.what: info for info in saved(layer(x.exp()).sum())}
    assert found["mat1 of AddmmBackward0"].op == "Exp"
    assert found["result of ExpBackward0"].op == "Exp"
    normed = {info.what: info.op for info in saved(nn.LayerNorm(4)(x).sum())}
    assert normed["result1 of NativeLayerNormBackward0"] == "NativeLayerNorm"


def test_tensors_that_no_node_computed_are_given():
    x, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    hidden = (x @ weight).exp()
    found = {info.what: info.given for info in saved(hidden * (x > 0))}
    assert found == {
        "self of MmBackward0": True,
        "result of ExpBackward0": False,
        "other of MulBackward0": True,
    }
    normed = {info.what: info.given for info in saved(nn.LayerNorm(4)(hidden))}
    assert not normed["result1 of NativeLayerNormBackward0"]
    assert normed["weight of NativeLayerNormBackward0"]
    assert [info.given for info in saved(weight.t().sin())] == [True]  # a view shares the memory of its leaf


def test_a_copy_in_another_dtype_refers_to_its_parameter():
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        root = layer(torch.randn(2, 4, requires_grad=True)).sum()
    casts = [info.cast_of for info in saved(root) if info.cast_of is not None]
    assert any(cast is layer.weight for cast in casts)


def test_reading_runs_no_saved_tensor_hooks():
    ran = []
    x = torch.randn(3, 4, requires_grad=True)

    def block(value):
        ran.append(1)
        return value.exp().sin()

    root = checkpoint(block, x, use_reentrant=False).sum()
    assert not saved(root)  # a checkpoint saves no activations
    assert len(ran) == 1
    root.backward()
    assert len(ran) == 2


def test_tensors_kept_by_a_custom_autograd_function_are_found():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            ctx.save_for_backward(value)
            ctx.mask = value > 0
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    x = torch.randn(3, requires_grad=True)
    assert {info.what for info in saved(Twice.apply(x))} == {"TwiceBackward", "mask of TwiceBackward"}


def test_a_freed_graph_has_no_saved_tensors():
    root = torch.randn(3, requires_grad=True).exp().sum()
    assert saved(root)
    root.backward()
    assert not saved(root)
    assert not saved(torch.ones(3), None, "text")


def test_reading_does_not_change_gradients():
    torch.manual_seed(0)
    net, x = NETS["perceptron"](), torch.randn(5, 4)
    for read in (False, True):
        torch.manual_seed(1)
        net.zero_grad()
        root = net(x).sum()
        if read:
            saved(root)
        root.backward()
        gradients = [parameter.grad.clone() for parameter in net.parameters()]
        if not read:
            plain = gradients
    assert all(map(torch.equal, plain, gradients))


@pytest.mark.parametrize("slots", [False, True])
def test_tensors_are_found_in_dataclasses(slots):
    x = torch.ones(2)
    result = make_dataclass("Result", ["logits", "loss"], slots=slots)([x, None], {"mean": x + 1})
    assert [each.tolist() for each in tensors_in_containers(result)] == [[1, 1], [2, 2]]
