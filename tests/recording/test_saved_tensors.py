"""What autograd keeps for the backward, read from its graph: on the CPU, where the graph is the same."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memfit.recording import saved_tensors
from memfit.recording.saved_tensors import saved_for_backward


def saved(*roots):
    return list(saved_for_backward(roots))


def storages(found):
    return {one.tensor.untyped_storage().data_ptr() for one in found}


def by_hooks(compute):
    """Return the storages that saved-tensor hooks see: another way to ask."""
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
def test_it_is_what_saved_tensor_hooks_see(name):
    torch.manual_seed(0)
    net, x = NETS[name](), torch.randn(5, 4)
    if name == "attention":
        x = x[None]

    def compute():
        out = net(x)
        return (out[0] if isinstance(out, tuple) else out).square().mean()

    root, seen = by_hooks(compute)
    assert storages(saved(root)) == seen


def test_who_made_it_and_who_wants_it_are_named():
    x = torch.randn(3, 4, requires_grad=True)
    layer = nn.Linear(4, 2)
    found = {one.what: one for one in saved(layer(x.exp()).sum())}
    assert found["mat1 of AddmmBackward0"].op == "Exp"
    assert found["result of ExpBackward0"].op == "Exp"
    normed = {one.what: one.op for one in saved(nn.LayerNorm(4)(x).sum())}
    assert normed["result1 of NativeLayerNormBackward0"] == "NativeLayerNorm"


def test_what_no_graph_computed_was_given():
    x, weight = torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)
    hidden = (x @ weight).exp()
    found = {one.what: one.given for one in saved(hidden * (x > 0))}
    assert found == {
        "self of MmBackward0": True,
        "result of ExpBackward0": False,
        "other of MulBackward0": True,
    }
    normed = {one.what: one.given for one in saved(nn.LayerNorm(4)(hidden))}
    assert not normed["result1 of NativeLayerNormBackward0"]
    assert normed["weight of NativeLayerNormBackward0"]
    assert [one.given for one in saved(weight.t().sin())] == [True]  # a view of a leaf lies where that does


def test_a_copy_in_another_dtype_knows_its_parameter():
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        root = layer(torch.randn(2, 4, requires_grad=True)).sum()
    casts = [one.cast_of for one in saved(root) if one.cast_of is not None]
    assert any(one is layer.weight for one in casts)


def test_a_pytorch_that_does_not_show_it_is_not_asked(monkeypatch):
    monkeypatch.setattr(saved_tensors, "READABLE", False)  # as 2.8 and 2.9 are
    assert saved(torch.randn(3, requires_grad=True).exp().sum()) == []


def test_hooks_are_not_run():
    ran = []
    x = torch.randn(3, 4, requires_grad=True)

    def block(value):
        ran.append(1)
        return value.exp().sin()

    root = checkpoint(block, x, use_reentrant=False).sum()
    assert not saved(root)  # a checkpoint keeps none of its own
    assert len(ran) == 1
    root.backward()
    assert len(ran) == 2


def test_what_a_function_of_ones_own_keeps_is_found():
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
    assert {one.what for one in saved(Twice.apply(x))} == {"TwiceBackward", "mask of TwiceBackward"}


def test_a_graph_that_is_freed_holds_nothing():
    root = torch.randn(3, requires_grad=True).exp().sum()
    assert saved(root)
    root.backward()
    assert not saved(root)
    assert not saved(torch.ones(3), None, "text")


def test_reading_it_leaves_gradients_as_they_are():
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
