"""Packing a graph: each device by itself, without the graph's inputs."""

import pytest

from memfit.errors import UsageError
from memfit.packing.graph_packing import pack_graph
from memfit.packing.packing_violations import find_packing_violation
from memfit.records import Dataflow, GraphValue
from support.known_packings import gapless_problem

CHAIN = (  # three values, at most two live at once
    GraphValue("x", 0, 2, 4096, "cuda:0", given=True),
    GraphValue("a", 1, 3, 1000, "cuda:0", given=False),
    GraphValue("b", 2, 4, 1000, "cuda:0", given=False),
    GraphValue("c", 3, 5, 1000, "cuda:0", given=False),
)


def test_values_with_disjoint_lifetimes_share_memory():
    found = pack_graph(Dataflow(CHAIN, ()), seconds=10)
    assert (found.height, found.bound, found.live) == (2048, 2048, 2048)
    assert found.unshared == 3072
    assert found.given == 4096
    ((buffers, offset),) = found.parts
    assert buffers.names == ("a", "b", "c")
    assert find_packing_violation(buffers, offset, found.height) == ""


def test_an_alias_set_is_one_buffer():
    found = pack_graph(Dataflow(CHAIN, ((1, 2),)), seconds=10)
    ((buffers, _),) = found.parts
    assert (buffers.names, buffers.lower.tolist(), buffers.upper.tolist()) == (("a", "c"), [1, 3], [4, 5])


def test_each_device_has_its_own_packing():
    values = (*CHAIN, GraphValue("seed", 2, 4, 8, "cpu", given=False))
    found = pack_graph(Dataflow(values, ()), seconds=10)
    assert [(arena.device, arena.packing.height) for arena in found.arenas] == [
        ("cuda:0", 2048),
        ("cpu", 512),
    ]
    assert found.height == found.live == 2560
    assert {int(offset.min()) for _, offset in found.parts} == {0, 2048}


def test_an_empty_value_is_not_a_buffer():
    values = (*CHAIN, GraphValue("empty", 2, 4, 0, "cuda:0", given=False))
    assert pack_graph(Dataflow(values, ()), seconds=10).parts[0][0].names == ("a", "b", "c")


def test_a_packing_within_the_capacity_is_not_improved():
    problem = gapless_problem(3, 90)  # only the search packs it at 10,000
    rows = zip(problem.lower.tolist(), problem.upper.tolist(), problem.size.tolist(), strict=True)
    values = tuple(
        GraphValue("a", lower, upper, 512 * size, "cpu", given=False) for lower, upper, size in rows
    )
    found = pack_graph(Dataflow(values, ()), capacity=512 * 20_000, seconds=60)
    assert found.arenas[0].packing.how != "by search"
    assert 512 * 10_000 < found.height <= 512 * 20_000


@pytest.mark.parametrize("values", [(), CHAIN[:1]])
def test_a_graph_that_allocates_nothing_is_rejected(values):
    with pytest.raises(UsageError, match="nothing to pack"):
        pack_graph(Dataflow(values, ()), seconds=10)
