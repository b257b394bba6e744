"""Graphs whose dataflow cannot be followed: each is refused with the operation and its line."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import memfit
from memfit.errors import TargetError, UsageError
from support.handmade_graphs import SmallAttentionBlock, V, graph_of

aten = torch.ops.aten
SET_STORAGE = (aten.set_.source_Tensor, V(0), V(1))


def sparse_input():
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.eye(3).to_sparse()
    graph.output(graph.call_function(aten.add.Tensor, (node, node)))
    return fx.GraphModule({}, graph)


def sparse_result():
    indices = torch.zeros(1, 3, dtype=torch.long)
    return make_fx(lambda x: torch.sparse_coo_tensor(indices, x, (9,), check_invariants=False))(torch.ones(3))


def without_sizes():
    return fx.symbolic_trace(lambda x: x + 1)


def with_a_module_call():
    module = fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    next(iter(module.graph.nodes)).meta["val"] = torch.zeros(1, 2)
    return module


def with_dynamic_shapes():
    return make_fx(lambda x: x + 1, tracing_mode="symbolic")(torch.ones(5, 3))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # by 2.11 and 2.12, despite check_invariants
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_fx(lambda x: torch.nonzero(x) + 1)(torch.ones(3)), "nonzero (nonzero.default)"),
        (lambda: make_fx(torch.geqrf)(torch.ones(3, 3)), "geqrf (geqrf.default)"),
        (sparse_input, "x is a torch.sparse_coo tensor"),
        (sparse_result, "is a torch.sparse_coo tensor"),
        (lambda: graph_of(SET_STORAGE)[0], "moves x0 to another storage"),
        (lambda: graph_of(SET_STORAGE)[0], "set_.source_Tensor"),
        (
            lambda: make_fx(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))(torch.ones(3)),
            "is a subgraph",
        ),
        (without_sizes, "x has no size"),
        (with_a_module_call, "is a subgraph"),
        (with_dynamic_shapes, "sizes must be plain numbers"),
    ],
)
def test_operations_that_cannot_be_followed_are_named(make, words):
    with pytest.raises(TargetError) as refusal:
        memfit.pack(make())
    assert str(refusal.value).startswith("Cannot pack the graph: ")
    assert words in str(refusal.value)


def test_the_line_of_the_operation_is_named():
    program = torch.export.export(SmallAttentionBlock(), (torch.randn(2, 3, 8, 8),))
    for node in program.graph_module.graph.nodes:
        if node.op == "call_function" and "relu" in node.name:
            node.target = aten.nonzero.default
    with pytest.raises(
        TargetError, match=r"handmade_graphs.py\", line \d+, in forward, cannot be run on fake tensors"
    ):
        memfit.pack(program.graph_module)


def test_a_value_that_is_not_a_graph_is_refused():
    program = torch.export.export(SmallAttentionBlock(), (torch.randn(2, 3, 8, 8),))
    with pytest.raises(UsageError, match=r"type ExportedProgram.*\.graph_module of an exported"):
        memfit.pack(program)
