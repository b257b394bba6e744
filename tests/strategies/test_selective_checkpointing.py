"""Operations that a plan keeps run once: however often, and in whatever parts, the backward runs."""

import copy
from collections import Counter

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils._python_dispatch import TorchDispatchMode

from memfit import Checkpointing

ADDMM = "aten.addmm.default"
IGNORED = ("aten.detach.default", "aten.empty.memory_format")
"""What checkpointing itself runs in the forward, in some versions of PyTorch."""


class Ran(TorchDispatchMode):
    """Counts what runs, below everything that keeps results."""

    def __init__(self):
        super().__init__()
        self.forward, self.backward = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        in_backward = torch._C._current_graph_task_id() != -1
        if str(func) not in IGNORED:
            (self.backward if in_backward else self.forward)[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Four products; the second result is kept, where a test keeps one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def net():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def gradients(model, backward):
    x = torch.linspace(-1, 1, 18).reshape(3, 6).requires_grad_()
    with Ran() as ran:
        backward(model(x))
    return ran, [each.grad for each in (*model.parameters(), x)]


def check(backward, *, again, kept=(f"{ADDMM}:1",), model=None, modules="*"):
    """Train one step with a checkpoint around each block and without; count the products that run again."""
    model = net() if model is None else model
    plain, expected = gradients(copy.deepcopy(model), backward)
    Checkpointing(modules, save_ops=kept).apply(model)
    ran, found = gradients(model, backward)
    assert all(map(torch.equal, expected, found))
    assert ran.forward == plain.forward
    assert ran.backward[ADDMM] - plain.backward[ADDMM] == again


def once(y):
    y.square().sum().backward()


def test_a_kept_call_does_not_run_again():
    check(once, again=2 * 3)


@pytest.mark.parametrize(
    ("kept", "again"),
    [
        ((), 8),
        ((f"{ADDMM}:0",), 6),
        ((f"{ADDMM}:0", f"{ADDMM}:3"), 4),
        (tuple(f"{ADDMM}:{number}" for number in range(4)), 0),
        (("aten.addmm",), 0),
    ],
)
def test_each_kept_call_saves_one_run(kept, again):
    check(once, again=again, kept=kept)


def test_a_retained_graph_keeps_results_for_the_next_backward():
    def twice(y):
        loss = y.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    check(twice, again=2 * 2 * 3)


def test_backwards_of_two_losses_through_one_region():
    def two_losses(y):
        y[0].sum().backward(retain_graph=True)
        y[1].square().sum().backward()

    check(two_losses, again=2 * 2 * 3)


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.one(x).tanh(), self.other(x).tanh()


def test_what_a_backward_has_released_runs_again_for_another_part_of_the_region():
    """The first backward takes both kept results: it recomputes up to what it needs, in order."""

    def one_after_the_other(results):
        one, other = results
        other.square().sum().backward()
        one.square().sum().backward()

    model = nn.Sequential(TwoHeads())
    # First recomputation: neither. Second: the first product, which the first recomputation released.
    check(one_after_the_other, again=2, kept=("aten.addmm",), model=model)


def test_gradients_of_gradients():
    def penalty(y):
        found = torch.autograd.grad(y.square().sum(), [*model.parameters()], create_graph=True)
        (y.sum() + sum(each.square().sum() for each in found)).backward()

    model = net()
    _, expected = gradients(model, penalty)
    model = net()
    Checkpointing("*", save_ops=(f"{ADDMM}:1",)).apply(model)
    _, found = gradients(model, penalty)
    assert all(map(torch.equal, expected, found))


def test_nested_regions_keep_their_own_calls():
    model = nn.Sequential(net())
    Checkpointing("0.*", save_ops=(f"{ADDMM}:1",)).apply(model)
    plain, expected = gradients(nn.Sequential(net()), once)
    Checkpointing("0", save_ops=(f"{ADDMM}:2",)).apply(model)
    ran, found = gradients(model, once)
    assert all(map(torch.equal, expected, found))
    # The outer one runs again up to the second block's input, without its third call; then each block.
    assert ran.backward[ADDMM] - plain.backward[ADDMM] == 3 + 2 * 3


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).mul(2).relu_()
        return x


def test_operations_in_place_run_again_though_they_are_to_be_kept():
    check(once, again=2 * 3, kept=(f"{ADDMM}:1", "aten.relu_"), model=nn.Sequential(InPlace(), InPlace()))


def test_a_kept_result_that_is_changed_in_place_is_refused():
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            return self.layer(x).relu_().tanh()

    model = nn.Sequential(Changed())
    Checkpointing("*", save_ops=("aten.addmm",)).apply(model)
    with pytest.raises(RuntimeError, match="changed in place after the forward used it"):
        gradients(model, once)


def test_saved_tensor_hooks_of_the_script_see_kept_results():
    packed = []

    def pack(tensor):
        packed.append(tuple(tensor.shape))
        return tensor.clone()

    model = net()
    Checkpointing("*", save_ops=(f"{ADDMM}:1",)).apply(model)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        y = model(torch.ones(5, 6, requires_grad=True))
    # Of each block: its input and one kept result; and what the loss saves is outside.
    assert packed.count((5, 6)) == 4
    y.sum().backward()


@pytest.mark.parametrize("kept", [(), (f"{ADDMM}:1",), (f"{ADDMM}:0", f"{ADDMM}:1", f"{ADDMM}:3")])
def test_compiled_regions_keep_as_eager_ones_do(kept):
    backwards = []

    def count(graph, _inputs):
        backwards.append([str(node.target) for node in graph.graph.nodes].count(ADDMM))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        bw_compiler=count,
        partition_fn=min_cut_rematerialization_partition,
    )
    model = net()
    Checkpointing("*", save_ops=kept).apply(model)
    model = torch.compile(model, backend=backend, fullgraph=True)
    once(model(torch.ones(3, 6, requires_grad=True)))
    # The last product makes what the model returns, which exists anyway.
    assert backwards == [2 * (4 - len(kept)) - (f"{ADDMM}:3" not in kept)]
