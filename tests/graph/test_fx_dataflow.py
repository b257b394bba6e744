"""The dataflow of a graph, compared with a run on the CPU: storages, bytes and lifetimes."""

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
import memfit.packing.graph_packing
from memfit.graph.fx_dataflow import dataflow_of_fx_graph
from memfit.packing.graph_packing import alias_sets
from support import captured_graphs, storage_referee
from support.handmade_graphs import SmallAttentionBlock, V, graph_of

aten = torch.ops.aten


X = V(0)
MADE = (aten.add.Tensor, V(0), V(1))  # value 2: memory that the graph allocates
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
def test_values_in_one_storage_form_one_set(sets, calls):
    module, inputs = graph_of(MADE, *calls)
    assert storage_referee.differences(module, inputs) == []
    own = [found for found in alias_sets(dataflow_of_fx_graph(module)) if not found.given]
    first = [found for found in own if "add_tensor" in found.names or "add" in found.names]
    assert len(first) == 1
    assert len(own) - (calls[0][0] is aten.native_dropout.default) == sets  # its mask is a separate set


def test_schemas_declare_no_alias_for_unsafe_views_and_lists():
    """Why the dataflow is not read from operator schemas."""
    for call in (aten._unsafe_view.default, aten.unsafe_split.Tensor):
        assert all(returned.alias_info is None for returned in call._schema.returns)


def test_fake_tensors_left_by_tracing_do_not_share_storages():
    module = make_fx(lambda x: x.add(1).view(-1))(torch.zeros(2, 3))
    added, view = (node.meta["val"] for node in module.graph.nodes if node.op == "call_function")
    assert added.untyped_storage()._cdata != view.untyped_storage()._cdata
    assert len([found for found in alias_sets(dataflow_of_fx_graph(module)) if not found.given]) == 1


@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.binary_cross_entropy, F.soft_margin_loss])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_mean_loss_keeps_the_memory_of_all_elements(loss, reduction):
    x = torch.rand(10, 3)
    graph = captured_graphs.traced(lambda x: loss(x, x, reduction=reduction), x)
    assert storage_referee.differences(graph.module, graph.inputs) == []
    assert (
        max(found.size for found in alias_sets(dataflow_of_fx_graph(graph.module)) if not found.given) == 120
    )


def test_efficient_zero_tensors_have_no_bytes():
    graph = captured_graphs.traced(lambda x: (torch._efficientzerotensor([9]), x + 1), torch.ones(3))
    assert storage_referee.differences(graph.module, graph.inputs) == []
    assert (
        sum(found.size for found in alias_sets(dataflow_of_fx_graph(graph.module)) if not found.given) == 12
    )


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
def test_a_scatter_copies_the_gaps_of_its_input(scatter):
    """Two equal calls: the fake tensor cache would size the second storage by its shape."""
    x = torch.zeros(4, 6)[:, 1:4]
    graph = captured_graphs.traced(lambda x: (scatter(x), scatter(x)), x)
    next(iter(graph.module.graph.nodes)).meta["val"] = x  # tracing drops the gaps
    assert storage_referee.differences(graph.module, graph.inputs) == []
    sizes = [found.size for found in alias_sets(dataflow_of_fx_graph(graph.module)) if not found.given]
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
    """Return a graph of the instructions that can run, each on values that exist."""
    inputs = [torch.rand(4, 6), torch.rand(4, 6)]
    inputs.append(inputs[0].t() if tied else torch.rand(6, 4))
    graph = fx.Graph()
    existing = []
    for number, (tensor, tried) in enumerate(zip(inputs, copy.deepcopy(inputs), strict=True)):
        node = graph.placeholder(f"x{number}")
        node.meta["val"] = tensor
        existing.append((node, tried))
    for instruction, *numbers in drawn:
        (node, tensor), (second, operand) = (existing[number % len(existing)] for number in numbers)
        try:
            function, arguments = instruction(tensor, operand)
            result = function(*arguments)
        except (RuntimeError, IndexError):
            continue
        call = graph.call_function(*instruction(node, second))
        if isinstance(result, list | tuple):
            existing += [
                (graph.call_function(operator.getitem, (call, at)), part) for at, part in enumerate(result)
            ]
        elif result is not None:
            existing.append((call, result))
    graph.output([node for node, _ in existing[-2:]])
    return fx.GraphModule({}, graph), inputs


@settings(max_examples=150, deadline=None, derandomize=True)
@given(instructions, st.booleans())
def test_storages_of_random_programs_equal_those_of_a_run(drawn, tied):
    module, inputs = program(drawn, tied=tied)
    assert storage_referee.differences(module, inputs) == []


def test_storages_of_a_small_model_equal_those_of_a_run():
    kinds = []
    for graph in captured_graphs.every_kind(SmallAttentionBlock(), torch.sum, torch.randn(2, 3, 8, 8)):
        assert storage_referee.differences(graph.module, graph.inputs) == []
        kinds.append(graph.kind)
    assert kinds == ["training", "forward", "backward", "exported"]


@pytest.mark.slow
def test_storages_of_resnet_equal_those_of_a_run():
    torchvision = pytest.importorskip("torchvision")
    model = torchvision.models.resnet18()
    for graph in captured_graphs.every_kind(model, torch.sum, torch.randn(2, 3, 32, 32)):
        assert storage_referee.differences(graph.module, graph.inputs) == []


@pytest.mark.slow
def test_storages_of_gpt2_equal_those_of_a_run():
    pytest.importorskip("transformers")
    model = captured_graphs.GPT2(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8)
    for graph in captured_graphs.every_kind(model, torch.sum, torch.zeros(2, 8, dtype=torch.long)):
        assert storage_referee.differences(graph.module, graph.inputs) == []


def test_packing_a_graph_for_a_gpu_needs_no_gpu():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        x = torch.empty(64, 256, device="cuda")
        module = make_fx(lambda x: (x @ x.t()).relu_().sum())(x)
    found = memfit.pack(module)
    assert [(arena.device, arena.packing.height) for arena in found.arenas] == [("cuda:0", 64 * 64 * 4 + 512)]
    assert found.given == 64 * 256 * 4


def test_inputs_in_one_storage_are_counted_once():
    module, _ = program([], tied=True)
    assert memfit.graph.fx_dataflow.dataflow_of_fx_graph(module).shared == ((0, 2),)
    assert sum(found.size for found in alias_sets(dataflow_of_fx_graph(module))) == 2 * 96


def test_the_graph_and_its_inputs_are_unchanged():
    module, inputs = graph_of((aten.resize_.default, X, [50]), (aten.add_.Tensor, V(1), 1.0))
    before = [tensor.clone() for tensor in inputs], module.code
    metas = [dict(node.meta) for node in module.graph.nodes]
    dataflow_of_fx_graph(module)
    assert module.code == before[1]
    assert all(torch.equal(*pair) for pair in zip(inputs, before[0], strict=True))
    assert [dict(node.meta) for node in module.graph.nodes] == metas
    assert torch.is_grad_enabled()


def test_a_graph_that_disables_gradients_leaves_them_enabled_here():
    module, _ = graph_of(MADE, (torch._C._set_grad_enabled, False), MADE)
    assert torch.is_grad_enabled()
    dataflow_of_fx_graph(module)
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
        assert sum(not found.given for found in alias_sets(dataflow_of_fx_graph(module))) == sets


def test_sizes_may_come_from_fake_tensor_prop():
    module = fx.symbolic_trace(lambda x: x + 1)
    FakeTensorProp(module).propagate(torch.zeros(300))
    assert memfit.pack(module).height == 1536


def test_the_packing_of_a_graph_is_printed_with_its_rows():
    found = memfit.pack(make_fx(lambda x: (x + 1).relu_() * 2)(torch.ones(1000)))
    assert str(found).startswith("PACKED   8.0 KiB, proven minimal\n")
    for text in (
        "each buffer of the graph by itself  8.0 KiB",
        "planned",
        "simulated",
        "Not included: 3.9 KiB of inputs",
    ):
        assert text in str(found)


@pytest.mark.parametrize("module", [memfit.graph.fx_dataflow, memfit.packing.graph_packing])
def test_docstring_examples_are_correct(module):
    assert doctest.testmod(module).failed == 0
