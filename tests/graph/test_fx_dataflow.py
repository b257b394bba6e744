"""What a graph makes and uses, next to what happens when it runs on the CPU: storages, bytes and lives."""

import copy
import doctest
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn import functional as F  # noqa: N812

import memfit
import memfit.graph.fx_dataflow
import memfit.packing.alias_sets
from memfit.errors import TargetError, UsageError
from memfit.graph.fx_dataflow import dataflow
from memfit.packing.alias_sets import alias_sets
from support import captured_graphs, storage_referee

aten = torch.ops.aten


def graph_of(*calls, inputs=2, returns=-1):
    """Return a graph of calls: each a function and its arguments; ``V(n)`` is the n-th value before it."""
    graph = fx.Graph()
    given_tensors = [torch.randn(4, 6) for _ in range(inputs)]
    values = []
    for tensor in given_tensors:
        values.append(graph.placeholder(f"x{len(values)}"))
        values[-1].meta["val"] = tensor
    for function, *arguments in calls:
        placed = fx.node.map_aggregate(
            tuple(arguments), lambda one: values[one.number] if isinstance(one, V) else one
        )
        keywords = placed[-1] if isinstance(placed[-1], dict) else {}
        values.append(graph.call_function(function, placed[: len(placed) - bool(keywords)], keywords))
    graph.output(values[returns])
    return fx.GraphModule({}, graph), given_tensors


class V:
    """A value of the graph."""

    def __init__(self, number):
        self.number = number


X = V(0)
MADE = (aten.add.Tensor, V(0), V(1))  # the value 2: memory of the graph's own
T = V(2)
ADAM = {
    "lr": 0.1,
    "beta1": 0.9,
    "beta2": 0.9,
    "weight_decay": 0.0,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}


@pytest.mark.parametrize(
    ("sets", "calls"),
    [
        (1, [(aten.split.Tensor, T, 2), (operator.getitem, V(3), 1)]),
        (1, [(aten.unbind.int, T), (operator.getitem, V(3), 0)]),
        (1, [(aten.chunk.default, T, 2), (operator.getitem, V(3), 1)]),
        (1, [(aten.unsafe_split.Tensor, T, 2)]),
        (1, [(aten._unsafe_view.default, T, [24])]),
        (1, [(aten._unsafe_view.default, T, [24]), (aten._unsafe_view.default, T, [24])]),
        (1, [(aten.reshape.default, T, [24])]),
        (2, [(aten.t.default, T), (aten.reshape.default, V(3), [24])]),
        (1, [(aten.contiguous.default, T)]),
        (2, [(aten.t.default, T), (aten.contiguous.default, V(3))]),
        (1, [(aten.to.dtype, T, torch.float32)]),
        (2, [(aten.to.dtype, T, torch.float64)]),
        (1, [(aten.detach.default, T)]),
        (1, [(aten.lift_fresh.default, T)]),
        (1, [(aten.dropout.default, T, 0.5, False)]),
        (1, [(aten.expand.default, T, [3, 4, 6])]),
        (1, [(aten.as_strided.default, T, [3], [2], 1)]),
        (1, [(aten.add_.Tensor, T, X)]),
        (1, [(aten.add.out, T, X, {"out": T})]),
        (1, [(aten._foreach_add_.Scalar, [T], 1.0)]),
        (2, [(aten.zeros.default, [1]), (aten._fused_adam_.default, [X], [X], [X], [T], [], [V(3)], ADAM)]),
        (2, [(aten.clone.default, T)]),
        (2, [(aten._to_copy.default, T)]),
        (2, [(aten.cat.default, [T])]),
        (2, [(aten.native_dropout.default, T, 0.5, True), (operator.getitem, V(3), 0)]),
    ],
)
def test_what_shares(sets, calls):
    module, inputs = graph_of(MADE, *calls)
    assert storage_referee.differences(module, inputs) == []
    own = [found for found in alias_sets(dataflow(module)) if not found.given]
    first = [found for found in own if "add_tensor" in found.names or "add" in found.names]
    assert len(first) == 1
    assert len(own) - (calls[0][0] is aten.native_dropout.default) == sets  # its mask is a third


def test_schemas_would_not_have_told():
    """Of ``_unsafe_view`` and of a list's elements, the schema says nothing; that is why it is not asked."""
    for call in (aten._unsafe_view.default, aten.unsafe_split.Tensor):
        assert all(returned.alias_info is None for returned in call._schema.returns)


def test_what_tracing_left_in_the_graph_would_not_have_told():
    module = make_fx(lambda x: x.add(1).view(-1))(torch.zeros(2, 3))
    added, view = (node.meta["val"] for node in module.graph.nodes if node.op == "call_function")
    assert added.untyped_storage()._cdata != view.untyped_storage()._cdata
    assert len([found for found in alias_sets(dataflow(module)) if not found.given]) == 1


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_mean_keeps_the_memory_of_all_losses(loss, reduction):
    x = torch.rand(10, 3)
    graph = captured_graphs.traced(lambda x: loss(x, x, reduction=reduction), x)
    assert storage_referee.differences(graph.module, graph.inputs) == []
    assert max(found.size for found in alias_sets(dataflow(graph.module)) if not found.given) == 120


def test_zeros_that_are_never_written_down_have_no_bytes():
    graph = captured_graphs.traced(lambda x: (torch._efficientzerotensor([9]), x + 1), torch.ones(3))
    assert storage_referee.differences(graph.module, graph.inputs) == []
    assert sum(found.size for found in alias_sets(dataflow(graph.module)) if not found.given) == 12


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("train", [True, False, None])
def test_dropout_that_drops_nothing_copies(train, p):
    graph = captured_graphs.traced(lambda x: torch.native_dropout(x, p, train), torch.rand(10, 3))
    assert storage_referee.differences(graph.module, graph.inputs) == []


@pytest.mark.parametrize(
    "scatter",
    [
        lambda x: aten.slice_scatter(x, x[:2], 0, 0, 2),
        lambda x: aten.select_scatter(x, x[0], 0, 0),
        lambda x: aten.diagonal_scatter(x, x.diagonal()),
        lambda x: aten.as_strided_scatter(x, x[:2], [2, 3], [6, 1]),
    ],
)
def test_a_scatter_copies_what_lies_between(scatter):
    """The second one like the first: PyTorch's cache would make its storage from its shape."""
    x = torch.zeros(4, 6)[:, 1:4]
    graph = captured_graphs.traced(lambda x: (scatter(x), scatter(x)), x)
    next(iter(graph.module.graph.nodes)).meta["val"] = x  # tracing has forgotten what lies between
    assert storage_referee.differences(graph.module, graph.inputs) == []
    sizes = [found.size for found in alias_sets(dataflow(graph.module)) if not found.given]
    assert sizes == [96, 96]


VIEWS_AND_COPIES = [
    lambda t, _: (aten.reshape.default, (t, [-1])),
    lambda t, _: (aten._unsafe_view.default, (t, [-1])),
    lambda t, _: (aten.transpose.int, (t, 0, -1)),
    lambda t, _: (aten.slice.Tensor, (t, 0, 1)),
    lambda t, _: (aten.select.int, (t, 0, 0)),
    lambda t, _: (aten.unsqueeze.default, (t, 0)),
    lambda t, _: (aten.expand.default, (t, [2, -1, -1])),
    lambda t, _: (aten.contiguous.default, (t,)),
    lambda t, _: (aten.to.dtype, (t, torch.float32)),
    lambda t, _: (aten.to.dtype, (t, torch.float64)),
    lambda t, _: (aten.detach.default, (t,)),
    lambda t, _: (aten.view.dtype, (t, torch.int32)),
    lambda t, _: (aten.split.Tensor, (t, 2)),
    lambda t, _: (aten.chunk.default, (t, 2)),
    lambda t, _: (aten.unbind.int, (t,)),
    lambda t, _: (aten.clone.default, (t,)),
    lambda t, _: (aten.empty_like.default, (t,)),
]
WRITING = [
    lambda t, o: (aten.add_.Tensor, (t, o)),
    lambda t, _: (aten.mul_.Scalar, (t, 2)),
    lambda t, o: (aten.copy_.default, (t, o)),
    lambda t, _: (aten.relu_.default, (t,)),
    lambda t, o: (aten._foreach_mul_.List, ([t, o], [o, t])),
    lambda t, o: (aten.resize_.default, (t, [9])),
]
COMPUTING = [
    lambda t, o: (aten.add.Tensor, (t, o)),
    lambda t, o: (aten.mul.Tensor, (t, o)),
    lambda t, o: (aten.cat.default, ([t, o],)),
    lambda t, _: (aten.sum.default, (t,)),
    lambda t, _: (aten.max.dim, (t, 0)),
]
instructions = st.lists(
    st.tuples(
        st.sampled_from(VIEWS_AND_COPIES + WRITING + COMPUTING), st.integers(0, 99), st.integers(0, 99)
    ),
    min_size=1,
    max_size=15,
)


def program(drawn, *, tied):
    """Return a graph of what can be done of some instructions, each on values that are there."""
    inputs = [torch.rand(4, 6), torch.rand(4, 6)]
    inputs.append(inputs[0].t() if tied else torch.rand(6, 4))
    graph = fx.Graph()
    there = []
    for number, (tensor, tried) in enumerate(zip(inputs, copy.deepcopy(inputs), strict=True)):
        node = graph.placeholder(f"x{number}")
        node.meta["val"] = tensor
        there.append((node, tried))
    for instruction, one, other in drawn:
        (node, tensor), (second, operand) = (there[number % len(there)] for number in (one, other))
        try:
            function, arguments = instruction(tensor, operand)
            result = function(*arguments)
        except (RuntimeError, IndexError):
            continue
        call = graph.call_function(*instruction(node, second))
        if isinstance(result, list | tuple):
            there += [
                (graph.call_function(operator.getitem, (call, at)), part) for at, part in enumerate(result)
            ]
        elif result is not None:
            there.append((call, result))
    graph.output([node for node, _ in there[-2:]])
    return fx.GraphModule({}, graph), inputs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(instructions, st.booleans())
def test_programs_of_views_lists_and_what_works_in_place(drawn, tied):
    module, inputs = program(drawn, tied=tied)
    assert storage_referee.differences(module, inputs) == []


class Small(torch.nn.Module):
    """A residual block with attention, a norm that keeps statistics, and what works in place."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.qkv, self.head = torch.nn.Linear(8, 24), torch.nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.norm(self.convolution(x)), inplace=True)
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        return self.head(F.dropout(x, 0.1, self.training)).mean(1)


def test_every_kind_of_graph():
    kinds = []
    for graph in captured_graphs.every_kind(Small(), torch.sum, torch.randn(2, 3, 8, 8)):
        assert storage_referee.differences(graph.module, graph.inputs) == []
        kinds.append(graph.kind)
    assert kinds == ["training", "forward", "backward", "exported"]


def test_resnet():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18()
    for graph in captured_graphs.every_kind(model, torch.sum, torch.randn(2, 3, 32, 32)):
        assert storage_referee.differences(graph.module, graph.inputs) == []


def test_gpt2():
    pytest.importorskip("transformers")
    model = captured_graphs.GPT2(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    for graph in captured_graphs.every_kind(model, torch.sum, torch.zeros(2, 8, dtype=torch.long)):
        assert storage_referee.differences(graph.module, graph.inputs) == []


def test_a_graph_for_a_gpu_needs_none():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = torch.empty(64, 256, device="cuda")
        module = make_fx(lambda x: (x @ x.t()).relu_().sum())(x)
    found = memfit.pack(module)
    assert [(arena.device, arena.packing.height) for arena in found.arenas] == [("cuda:0", 64 * 64 * 4 + 512)]
    assert found.given == 64 * 256 * 4


def test_inputs_that_lie_in_one_memory_are_given_once():
    module, _ = program([], tied=True)
    assert memfit.graph.fx_dataflow.dataflow(module).shared == ((0, 2),)
    assert sum(found.size for found in alias_sets(dataflow(module))) == 2 * 96


def test_the_graph_is_not_touched():
    module, inputs = graph_of((aten.resize_.default, X, [50]), (aten.add_.Tensor, V(1), 1.0))
    before = [tensor.clone() for tensor in inputs], module.code
    metas = [dict(node.meta) for node in module.graph.nodes]
    dataflow(module)
    assert module.code == before[1]
    assert all(torch.equal(*pair) for pair in zip(inputs, before[0], strict=True))
    assert [dict(node.meta) for node in module.graph.nodes] == metas
    assert torch.is_grad_enabled()


def test_a_graph_that_turns_gradients_off_does_so_for_itself():
    module, _ = graph_of(MADE, (torch._C._set_grad_enabled, False), MADE)
    assert torch.is_grad_enabled()
    dataflow(module)
    assert torch.is_grad_enabled()


def test_a_conjugate_is_a_view_and_resolving_it_a_copy():
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    negative = conjugate.imag
    for x, call, sets in (
        (conjugate, aten.resolve_conj.default, 1),
        (conjugate, aten._conj.default, 0),
        (negative, aten.resolve_neg.default, 1),
        (negative, aten._neg_view.default, 0),
    ):
        graph = fx.Graph()
        node = graph.placeholder("x")
        node.meta["val"] = x
        graph.output(graph.call_function(call, (node,)))
        module = fx.GraphModule({}, graph)
        assert (call(x).untyped_storage()._cdata != x.untyped_storage()._cdata) == sets
        assert sum(not found.given for found in alias_sets(dataflow(module))) == sets


def sparse_input():
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.eye(3).to_sparse()
    graph.output(graph.call_function(aten.add.Tensor, (node, node)))
    return fx.GraphModule({}, graph)


def sparse_result():
    places = torch.zeros(1, 3, dtype=torch.long)
    return make_fx(lambda x: torch.sparse_coo_tensor(places, x, (9,), check_invariants=False))(torch.ones(3))


def without_sizes():
    return fx.symbolic_trace(lambda x: x + 1)


def of_modules():
    module = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    next(iter(module.graph.nodes)).meta["val"] = torch.zeros(1, 2)
    return module


def dynamic():
    return make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(5, 3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: make_fx(lambda x: torch.nonzero(x) + 1)(torch.ones(3)), "nonzero (nonzero.default)"),
        (lambda: make_fx(torch.geqrf)(torch.ones(3, 3)), "geqrf (geqrf.default)"),
        (sparse_input, "x is torch.sparse_coo"),
        (sparse_result, "is torch.sparse_coo"),
        (lambda: graph_of((aten.set_.source_Tensor, X, V(1)))[0], "gives x0 another memory"),
        (lambda: graph_of((aten.set_.source_Tensor, X, V(1)))[0], "set_.source_Tensor"),
        (
            lambda: make_fx(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))(torch.ones(3)),
            "is a graph within the graph",
        ),
        (without_sizes, "x has no size"),
        (of_modules, "is a graph within the graph"),
        (dynamic, "sizes must be numbers"),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(make, said):
    with pytest.raises(TargetError) as refusal:
        memfit.pack(make())
    assert str(refusal.value).startswith("Cannot pack the graph: ")
    assert said in str(refusal.value)


def test_where_the_operation_stands_is_said():
    program = torch.export.export(Small(), (torch.randn(2, 3, 8, 8),))
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and "relu" in node.name:
            node.target = aten.nonzero.default
    with pytest.raises(
        TargetError, match=r"test_fx.py\", line \d+, in forward, cannot be run without values"
    ):
        memfit.pack(program.graph_module)


def test_what_is_no_graph_is_refused():
    program = torch.export.export(Small(), (torch.randn(2, 3, 8, 8),))
    with pytest.raises(
        UsageError, match=r"Cannot pack a ExportedProgram.*is its \.graph_module|Of an exported"
    ):
        memfit.pack(program)


def test_sizes_can_be_told():
    module = without_sizes()
    FakeTensorProp(module).propagate(torch.zeros(300))
    assert memfit.pack(module).height == 1536


def test_what_is_printed():
    found = memfit.pack(make_fx(lambda x: (x + 1).relu_() * 2)(torch.ones(1000)))
    assert str(found).startswith("PACKED   8.0 KiB, and no packing is smaller\n")
    for text in (
        "each buffer of the graph by itself  8.0 KiB",
        "planned",
        "simulated",
        "Beside it: 3.9 KiB of inputs",
    ):
        assert text in str(found)


@pytest.mark.parametrize("module", [memfit.graph.fx_dataflow, memfit.packing.alias_sets])
def test_examples_are_right(module):
    assert doctest.testmod(module).failed == 0
